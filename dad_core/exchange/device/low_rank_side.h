// One side of error feedback (exchange/method/low_rank/low_rank_state.h) with its residual on a
// device:
//
//   E' = E - pending + terms;   C = wire(top_r(E'))
//
// All of it on the device, in new memory: directions, their encoding, and what receivers will
// decode of it. Only the encoding comes to the host. Commit makes E' the residual and C what is
// pending; without it nothing has happened. Without feedback E is zero in every step, and only
// where to start is kept. float32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dad/state.h"
#include "exchange/device/arena.h"
#include "exchange/device/bench.h"
#include "exchange/device/subspace.h"
#include "exchange/device/transfer.h"
#include "exchange/feedback/state_store.h"
#include "exchange/method/low_rank/low_rank_share.h"
#include "exchange/method/low_rank/low_rank_state.h"
#include "linalg/low_rank.h"

namespace dad {

// Directions in device memory: k×m and k×columns.
struct DeviceFactors {
  int64_t k = 0;
  const float* ut = nullptr;
  const float* vt = nullptr;
};

// Rows of a layer in device memory: scale · dᵀ a, at rows out_begin of the gradient.
struct DeviceRows {
  const float* d = nullptr;  // rows×out_count
  const float* a = nullptr;  // rows×a_cols: n, the bias being like a column of ones; or with it
  int64_t rows = 0;
  int64_t out_begin = 0;
  int64_t out_count = 0;
  int64_t a_cols = 0;
  float scale = 1;
};

class DeviceLowRankSide {
 public:
  // `columns` counts the bias.
  DeviceLowRankSide(DeviceBench& bench, int64_t m, int64_t columns, bool bias, uint64_t seed)
      : bench_(bench), m_(m), columns_(columns), bias_(bias), seed_(seed) {}

  // ---- a step

  // E' without terms.
  Status Begin(Feedback feedback);
  // Terms; pointers are to device memory. The last has E of another side, and ends that.
  Status AddDense(const float* weight, const float* bias, float scale);
  Status AddRows(const DeviceRows& rows);
  Status AddIndexed(const float* x, const std::vector<uint32_t>& index, float scale);
  Status AddFactors(const DeviceFactors& factors, float scale);
  Status AddSide(const DeviceLowRankSide& other, float scale);
  // Puts the passes and the encoding on the stream.
  Status Compress(const LowRankOptions& options, Wire wire);
  // The same for rows alone, without feedback: in the place of Begin, the terms and Compress. Where
  // they are so few that it is exact, as on the host.
  bool IsExact(int64_t rows, const LowRankOptions& options) const {
    return rows <= options.exact_rows && rows < std::min(m_, columns_);
  }
  Status CompressRows(std::span<const DeviceRows> rows, const LowRankOptions& options, Wire wire);
  // Power iteration, in the place of Compress: P = V E'ᵀ (r×m), then Q = U E' (r×columns) for rows
  // of the host, each on its way to it.
  Status Project(const LowRankOptions& options);
  Status ProjectBack(std::span<const float> u);
  // What all apply is Uᵀ vt; of it `share` is this rank's, and `start` is where the next step
  // starts. Takes no memory: what is lacking was said before.
  Status TakeApplied(std::span<const float> vt, float share, std::span<const float> start);
  // When the device is through with that: whether E' is finite, and what is sent of it.
  void Read();
  std::span<const float> projected() const { return projected_; }
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
  // What the host has to know, as the device writes it.
  struct Flags {
    int not_finite;
    int kept;
  };

  int64_t n() const { return columns_ - (bias_ ? 1 : 0); }
  size_t num_bytes() const { return static_cast<size_t>(m_ * columns_) * sizeof(float); }
  static float* Floats(const DeviceBlock& block) { return reinterpret_cast<float*>(block.get()); }
  float* NewBias() const { return Floats(new_e_) + m_ * n(); }
  DeviceFactors pending() const { return {pending_k_, Floats(pending_ut_), Floats(pending_vt_)}; }
  DeviceResidual NewE() const { return {Floats(new_e_), bias_ ? NewBias() : nullptr, m_, n()}; }
  Result<DeviceBlock> TakeFloats(int64_t count);
  Status TakeBlocks(const LowRankOptions& options);
  Status LookAtE(int* not_finite);
  Status Encode(DeviceSubspace& subspace, Flags* flags, Wire wire);
  Status EncodeRows(float* x, int64_t rows, int64_t cols, std::byte* to);
  Status Fetch(const Flags* flags, const float* values, int64_t count);

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
  // State of the current step.
  Feedback feedback_ = Feedback::kDense;
  DeviceBlock new_e_;
  DeviceBlock new_warm_;
  int new_rank_ = 0;
  DeviceBlock sent_ut_, sent_vt_;  // r rows, from the k-th on zeros
  DeviceBlock own_vt_;             // of a power iteration: this rank's share of vt
  int64_t sent_k_ = 0;
  Wire wire_ = Wire::kFp32;
  bool finite_ = true;
  PinnedKeep pinned_;
  const std::byte* on_host_ = nullptr;  // Flags, then r encoded rows of ut and of vt
  std::span<const float> projected_;    // or P, or Q
  float* to_device_ = nullptr;          // page-locked: start, vt, own vt
};

// What one rank keeps for one layer.
class DeviceLowRankState final : public ExchangeState {
 public:
  DeviceLowRankState(const LowRankSettings& settings, std::shared_ptr<DeviceBench> bench)
      : rank(*bench, settings.layer.out, settings.columns(), settings.layer.bias,
             LowRankSeed(settings, 1)),
        owner(*bench, settings.layer.out, settings.columns(), settings.layer.bias,
              LowRankSeed(settings, 2)),
        m(settings.layer.out),
        columns(settings.columns()),
        bench_(std::move(bench)) {}

  void Export(std::vector<StateTensor>& out) override {
    rank.Export("rank_", out);
    owner.Export("owner_", out);
  }
  Status Import(const std::vector<StateTensor>& tensors) override {
    DAD_RETURN_IF_ERROR(rank.Import("rank_", tensors));
    return owner.Import("owner_", tensors);
  }
  // What was applied came from the owner's residual; without an owner from everybody's.
  void ReturnLast() override { (last_by_owner ? owner : rank).ReturnSent(); }

  DeviceLowRankSide rank;
  DeviceLowRankSide owner;
  const int64_t m;
  const int64_t columns;
  bool last_by_owner = true;

 private:
  const std::shared_ptr<DeviceBench> bench_;  // the sides use it
};

// The state of that layer. kUnavailable if the device has not the memory for what was saved.
Result<std::shared_ptr<DeviceLowRankState>> FindLowRankState(const TensorSpec& spec,
                                                             const LowRankSettings& settings,
                                                             const ExchangeEnv& env);

}  // namespace dad
