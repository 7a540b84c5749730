// What the sparse methods keep between steps, and how a share is read: by receivers, and by the
// sender that has to give back what it had sent.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "dad/status.h"
#include "exchange/feedback/accumulators.h"
#include "exchange/feedback/state_store.h"
#include "exchange/method/sparse/sparse_settings.h"
#include "util/aligned_buffer.h"
#include "util/byte_io.h"

namespace dad {

// Bits of a share's first byte.
constexpr uint8_t kSparseNotFinite = 1;
constexpr uint8_t kSparseReplan = 2;
constexpr uint8_t kSparseTooLarge = 4;
constexpr uint8_t kSparseAllFlags = 7;

// The most that a share may have: what a dense sum would send to each peer, but at least as much as
// the smallest messages.
int64_t MostSparseBytes(const SparseSettings& settings, DType dtype, int num_ranks);

// The number with which a tensor's codes become values; the head of its part of a share.
template <typename T>
struct SparseScale {
  int e_max = 0;  // vgc
  float tau = 0;  // strom, vgc_strom

  // What the codes stand for: up to 16.
  void Values(const SparseSettings& settings, T* values) const;
  void Write(const SparseSettings& settings, ByteWriter& out) const;
  // Whether a sender could have written it.
  bool Read(const SparseSettings& settings, ByteReader& in);
};

// Adds what a share sends of a tensor of `count` elements to `sum`; the number of elements added,
// or why it is malformed. `sum` is then unspecified.
template <typename T>
Result<int64_t> AddTensor(const SparseSettings& settings, int64_t count, ByteReader& in, T* sum);

// The same for those who add elsewhere: the elements as words (codec/sparse_code.h), by chunks,
// with what their codes stand for. Not for topk.
template <typename T>
struct SparseWords {
  int64_t begin = 0;  // of the chunk, in the tensor
  std::vector<uint32_t> words;
  T values[16] = {};
};
template <typename T>
Result<std::vector<SparseWords<T>>> ReadTensor(const SparseSettings& settings, int64_t count,
                                               ByteReader& in);

template <typename T>
class SparseState final : public ExchangeState {
 public:
  explicit SparseState(const SparseSettings& settings) : settings_(settings) {}

  // "residual" and "variance", as Accumulators has them; "tau": mean_rms.
  void Export(std::vector<StateTensor>& out) override;
  Status Import(const std::vector<StateTensor>& tensors) override;
  // What this rank had sent waits again.
  void ReturnLast() override;

  // Zeros, unless there is something already.
  void MakeRoom();

  const SparseSettings& settings() const { return settings_; }

  Accumulators<T> kept;
  std::array<double, 2> mean_rms = {};  // of the gradient of weight and bias; 0: none so far
  std::vector<std::byte> last_share;    // of the last step, if it sent something

 private:
  void Save(const char* name, const AlignedBuffer& values, std::vector<StateTensor>& out) const;

  const SparseSettings settings_;
};

}  // namespace dad
