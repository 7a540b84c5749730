// One side of error feedback (exchange/low_rank_state.h) with its residual on a device:
//
//   E' = E - pending + terms;   C = wire(top_r(E'))
//
// All of it on the device, in new memory: directions, their encoding, and what receivers will
// decode of it. Only the encoding comes to the host. Commit makes E' the residual and C what is
// pending; without it nothing has happened. float32.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dad/state.h"
#include "exchange/device/arena.h"
#include "exchange/device/bench.h"
#include "exchange/device/transfer.h"
#include "exchange/low_rank_state.h"
#include "linalg/low_rank.h"

namespace dad {

// Directions in device memory: k×m and k×columns.
struct DeviceFactors {
  int64_t k = 0;
  const float* ut = nullptr;
  const float* vt = nullptr;
};

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
  Status AddFactors(const DeviceFactors& factors, float scale);
  Status AddSide(const DeviceLowRankSide& other, float scale);
  // Puts the passes and the encoding on the stream.
  Status Compress(const LowRankOptions& options, Wire wire);
  // When the device is through with that: whether E' is finite, and what is sent of it.
  void Read();
  bool finite() const { return finite_; }
  DeviceFactors sent() const { return {sent_k_, Floats(sent_ut_), Floats(sent_vt_)}; }
  void AppendSent(std::vector<std::byte>& bytes) const;
  void Commit();
  // Ends the step, committed or not; page-locked memory stays until `event`.
  void End(const DeviceEvent& event);

  // ---- between steps

  bool empty() const { return e_ == nullptr; }
  void Clear();
  void ForgetSent() { returnable_ = false; }
  // What was sent last returns to the residual: it has not left it yet.
  void ReturnSent() {
    if (std::exchange(returnable_, false)) pending_k_ = 0;
  }
  void Export(const std::string& prefix, std::vector<StateTensor>& out) const;
  Status Import(const std::string& prefix, const std::vector<StateTensor>& tensors);

 private:
  int64_t n() const { return columns_ - (bias_ ? 1 : 0); }
  size_t num_bytes() const { return static_cast<size_t>(m_ * columns_) * sizeof(float); }
  static float* Floats(const DeviceBlock& block) { return reinterpret_cast<float*>(block.get()); }
  float* NewBias() const { return Floats(new_e_) + m_ * n(); }
  DeviceFactors pending() const { return {pending_k_, Floats(pending_ut_), Floats(pending_vt_)}; }
  Result<DeviceBlock> TakeFloats(int64_t count);
  Result<DeviceBlock> Start(const LowRankOptions& options);
  Status EncodeRows(float* x, int64_t rows, int64_t cols, std::byte* to);

  DeviceBench& bench_;
  const int64_t m_;
  const int64_t columns_;
  const bool bias_;
  const uint64_t seed_;
  DeviceBlock e_;     // m×n, then the bias; null until needed
  DeviceBlock warm_;  // r×columns
  int warm_rank_ = 0;
  DeviceBlock pending_ut_, pending_vt_;
  int64_t pending_k_ = 0;
  bool returnable_ = false;
  // Of the step.
  DeviceBlock new_e_;
  DeviceBlock new_warm_;
  int new_rank_ = 0;
  DeviceBlock sent_ut_, sent_vt_;  // r rows, from the k-th on zeros
  int64_t sent_k_ = 0;
  Wire wire_ = Wire::kFp32;
  bool finite_ = true;
  PinnedKeep pinned_;
  const std::byte* on_host_ = nullptr;  // {not finite, k}, then r encoded rows of ut and of vt
};

}  // namespace dad
