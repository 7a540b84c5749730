// What the sparse methods keep on a device between steps. Checkpoints have the same tensors as
// those of the host (exchange/method/sparse/sparse_state.h), so that a run may go on there, and the
// other way round.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "exchange/device/bench.h"
#include "exchange/feedback/state_store.h"
#include "exchange/method/sparse/sparse_state.h"

namespace dad {

// Words of a chunk in device memory, and what their codes stand for.
template <typename T>
struct DeviceWords {
  int64_t begin = 0;  // in r
  int64_t count = 0;
  T values[16] = {};
  DeviceBlock words;
};

// out[begin + index] += value, for each of the words.
template <typename T>
Status AddWords(DeviceBench& bench, const SparseSettings& settings, const uint32_t* words,
                int64_t count, const T* values, T* out);

template <typename T>
class DeviceSparseState final : public ExchangeState {
 public:
  DeviceSparseState(const SparseSettings& settings, std::shared_ptr<DeviceBench> bench)
      : settings_(settings), bench_(std::move(bench)) {}

  // The calling thread, a user's, waits for the copy.
  void Export(std::vector<StateTensor>& out) override;
  Status Import(const std::vector<StateTensor>& tensors) override;
  void ReturnLast() override;

  // Zeros, unless there is something already.
  Status MakeRoom();

  const SparseSettings& settings() const { return settings_; }
  T* r_values() const { return reinterpret_cast<T*>(r.get()); }
  T* v_values() const { return reinterpret_cast<T*>(v.get()); }
  double* means() const { return reinterpret_cast<double*>(mean_rms.get()); }

  DeviceBlock r;                     // weight, then bias
  DeviceBlock v;                     // null without a variance
  DeviceBlock mean_rms;              // two doubles
  std::vector<DeviceWords<T>> last;  // what the last step sent

 private:
  size_t num_bytes() const { return static_cast<size_t>(settings_.count()) * sizeof(T); }
  void Save(const char* name, DType dtype, int64_t count, const DeviceBlock& values,
            std::vector<StateTensor>& out) const;

  const SparseSettings settings_;
  const std::shared_ptr<DeviceBench> bench_;
};

}  // namespace dad
