// What chunked top-k sends of a tensor: places in Rice code, and for each element a sign and one of
// few levels relative to its chunk's scale. chunk_pick.h finds the elements.
//
// A tensor is cut into chunks of `chunk` elements in memory order, and chunks into runs that are as
// long as the places of a sparse code allow. For each run:
//
//   a sparse code (codec/sparse_code.h, rice) of `bits` bits: the sign is the highest, then the
//     number of the level
//   if it has elements:
//     bfloat16 each   the 2^(bits-1) levels, rising
//     bfloat16 each   the scale of each chunk that has elements
//
// An element is ± level · scale. The scale is the mean magnitude of what its chunk sends; the
// levels are those with which the squared error of the run is least, found by Lloyd's iteration, so
// that no distribution is assumed. Products are exact, since both factors are bfloat16. All ranges
// are such that a product is finite; what does not fit stays with the sender.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/sparse_code.h"
#include "dad/status.h"
#include "util/byte_io.h"

namespace dad {

struct ChunkCode {
  int64_t chunk = 4096;  // 1 to kMostChunk
  int64_t k = 64;        // 1 to chunk
  int bits = 2;          // 1 to 8

  static constexpr int64_t kMostChunk = 1 << 24;
  static constexpr int kMostBits = 8;

  int64_t num_chunks(int64_t count) const { return (count + chunk - 1) / chunk; }
  // Elements of a run: whole chunks.
  int64_t run() const { return MaxSparseExtent(bits) / chunk * chunk; }
  int64_t num_levels() const { return int64_t{1} << (bits - 1); }
  // The approximate size of an encoding of `count` elements.
  int64_t ExpectedBytes(int64_t count) const;
};

// Appends the encoding of a run. `index` rises, from the start of the run; `values` are the
// elements there, none of them zero. Each becomes what is left of it: itself less what is decoded.
template <typename T>
void EncodeChunkRun(const ChunkCode& code, std::span<const uint32_t> index, std::span<T> values,
                    std::vector<std::byte>& out);

// Takes one encoding of `count` elements (all runs) from the front of `in` and adds what it decodes
// to `sum`; the number of elements. Where `most` is given, it has a number for each chunk, and
// becomes the larger of that and of how many came. InvalidArgument if it is malformed; `sum` and
// `most` are then unspecified.
template <typename T>
Result<int64_t> AddChunks(const ChunkCode& code, int64_t count, ByteReader& in, T* sum,
                          std::vector<uint32_t>* most = nullptr);

}  // namespace dad
