// A rank's part in a step of the sparse methods (exchange/method/sparse/sparse.h), on the device:
// the pass over r and v, what is selected, and its words or Rice code. All of it is put on the
// stream at once; how much there is to send is known on the host when the heads are.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "exchange/device/arena.h"
#include "exchange/device/bench.h"
#include "exchange/method/sparse/sparse_settings.h"

namespace dad {

// One of a layer's two tensors in this step; pointers are to device memory.
template <typename T>
struct SparseTensor {
  int64_t count = 0;
  const T* g = nullptr;
  const T* s = nullptr;  // Σ g² over samples; null: the square of `scale` g
  T scale = 1;
  const T* r = nullptr;
  const T* v = nullptr;  // null without a variance
  T* new_r = nullptr;
  T* new_v = nullptr;
  const double* mean = nullptr;  // of the RMS, for a relative τ
  double* new_mean = nullptr;
};

// What the host has to know of a tensor, and of a chunk of it.
template <typename T>
struct TensorHead {
  cuda::Word<T> top;             // vgc: the largest |r|, as bits
  cuda::Threshold<T> threshold;  // strom, vgc_strom
};
struct ChunkHead {
  int64_t count;  // of elements that are sent
  int64_t bits;   // of the gaps, by Rice
  int k;
};

// What a chunk sends, in device memory.
struct CodedChunk {
  int64_t begin = 0;  // of its elements in the tensor
  int64_t extent = 0;
  ChunkHead* head = nullptr;
  const uint32_t* words = nullptr;
  const uint32_t* codes = nullptr;  // Rice: the codes, packed
  const uint32_t* gaps = nullptr;
};

template <typename T>
class SparseCoder {
 public:
  SparseCoder(DeviceBench& bench, const SparseSettings& settings)
      : bench_(bench), settings_(settings) {}

  // `head` and `chunk_heads` (one per chunk) are 0; *not_finite is set if the gradient is not. What
  // the chunks point to is in `arena`.
  Status Encode(const SparseTensor<T>& tensor, TensorHead<T>* head, ChunkHead* chunk_heads,
                int* not_finite, DeviceArena& arena, std::vector<CodedChunk>& chunks);

  // The pass again as if nothing were worth sending.
  Status KeepAll(const SparseTensor<T>& tensor, int* not_finite);

  static int64_t NumChunks(const SparseSettings& settings, int64_t count);

 private:
  // What was selected of a chunk.
  struct Lists {
    int64_t blocks = 0;
    cuda::Selection<T> selected = {};
    int64_t* total = nullptr;
    int32_t* block_count = nullptr;
    int64_t* offset = nullptr;
  };

  Status FindThreshold(const SparseTensor<T>& tensor, TensorHead<T>* head, int* not_finite,
                       DeviceArena& work);
  Status Select(const SparseTensor<T>& tensor, const cuda::Rule<T>& rule,
                const cuda::Threshold<T>* threshold, int64_t begin, int64_t extent, int* not_finite,
                DeviceArena& work, Lists& lists);
  Status EncodeWords(const SparseTensor<T>& tensor, const Lists& lists, const TensorHead<T>* head,
                     CodedChunk& chunk, uint32_t* words, DeviceArena& work);
  Status EncodeRice(CodedChunk& chunk, DeviceArena& arena, DeviceArena& work);

  DeviceBench& bench_;
  const SparseSettings& settings_;
};

}  // namespace dad
