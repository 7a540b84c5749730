// One side of error feedback (exchange/low_rank_state.h) with its residual on a device:
//
//   E' = E - pending + terms;   P = E' V;   Q = E'ᵀ P     on the device, in new memory
//   C = wire(top_r(E'))                                   on the host, from P and Q
//
// Commit makes E' the residual and C what is pending; without it nothing has happened. float32.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dad/state.h"
#include "exchange/device/arena.h"
#include "exchange/device/bench.h"
#include "exchange/device/transfer.h"
#include "exchange/low_rank_state.h"
#include "linalg/low_rank.h"

namespace dad {

class DeviceLowRankSide {
 public:
  // `columns` counts the bias.
  DeviceLowRankSide(DeviceBench& bench, int64_t m, int64_t columns, bool bias, uint64_t seed)
      : bench_(bench), m_(m), columns_(columns), bias_(bias), seed_(seed) {}

  // ---- a step

  // E' without terms.
  Status Begin();
  // Terms; pointers are to device memory. The last has E of another side, and ends that.
  Status AddDense(const float* weight, const float* bias, float scale);
  Status AddRows(const float* d, const float* a, int64_t rows, int64_t out_begin, int64_t out_count,
                 float scale);
  Status AddIndexed(const float* x, const std::vector<uint32_t>& index, float scale);
  Status AddFactors(const SentFactors<float>& factors, float scale);
  Status AddSide(const DeviceLowRankSide& other, float scale);
  // Puts the first pass on the stream.
  Status StartIteration(const LowRankOptions& options);
  // When the device is through with a pass: true if it was the last, else the next one is on the
  // stream.
  Result<bool> NextPass(CpuLevel level, const LowRankOptions& options);
  // After the last: whether E' is finite, and what is sent of it, with its encoding.
  bool finite() const { return finite_; }
  const SentFactors<float>& Round(Wire wire, std::vector<std::byte>& bytes);
  void Commit();
  // Ends the step, committed or not; page-locked memory stays until `event`.
  void End(const DeviceEvent& event);

  // ---- between steps

  bool empty() const { return e_ == nullptr; }
  void Clear();
  void ForgetSent() { returnable_ = false; }
  // What was sent last returns to the residual: it has not left it yet.
  void ReturnSent();
  void Export(const std::string& prefix, std::vector<StateTensor>& out) const;
  Status Import(const std::string& prefix, const std::vector<StateTensor>& tensors);

 private:
  int64_t n() const { return columns_ - (bias_ ? 1 : 0); }
  size_t num_bytes() const { return static_cast<size_t>(m_ * columns_) * sizeof(float); }
  static float* Floats(const DeviceBlock& block) { return reinterpret_cast<float*>(block.get()); }
  float* NewBias() const { return Floats(new_e_) + m_ * n(); }
  // k × columns on the host to k × n and k × 1 on the device.
  struct Split {
    float* weight = nullptr;
    float* bias = nullptr;
  };
  Result<Split> BringSplit(const float* rows, int64_t k, DeviceArena& work);
  Result<float*> Bring(const float* values, int64_t count, DeviceArena& work);
  Status LaunchPass(int rank);

  DeviceBench& bench_;
  const int64_t m_;
  const int64_t columns_;
  const bool bias_;
  const uint64_t seed_;
  DeviceBlock e_;            // m×n, then the bias; null until needed
  std::vector<float> warm_;  // r×columns
  int warm_rank_ = 0;
  SentFactors<float> pending_;
  bool returnable_ = false;
  // Of the step.
  DeviceBlock new_e_;
  std::vector<float> new_warm_;
  int passes_ = 0;
  Factors<float> found_;
  SentFactors<float> sent_;
  bool finite_ = true;
  PinnedKeep pinned_;
  const std::byte* from_pass_ = nullptr;  // {not finite}, P, Q, Q of the bias
};

}  // namespace dad
