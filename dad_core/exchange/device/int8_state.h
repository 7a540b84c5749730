// What int8 with feedback keeps on a device between steps.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "dad/state.h"
#include "exchange/by_method.h"
#include "exchange/device/bench.h"
#include "exchange/device/transfer.h"
#include "exchange/feedback/state_store.h"
#include "util/log.h"

namespace dad {

// In device memory what Int8State (exchange/method/int8/int8_state.h) has on the host; checkpoints
// have the same tensors.
template <typename T>
class DeviceInt8State final : public ExchangeState {
 public:
  explicit DeviceInt8State(std::shared_ptr<DeviceBench> bench) : bench_(std::move(bench)) {}

  void Export(std::vector<StateTensor>& out) override {
    Save("rank_residual", residual, out);
    Save("owner_residual", owner_residual, out);
  }
  Status Import(const std::vector<StateTensor>& tensors) override {
    for (const StateTensor& tensor : tensors) {
      const int64_t count = NumElements(tensor.shape);
      if (tensor.dtype != DTypeOf<T>() ||
          tensor.bytes.size() != static_cast<size_t>(count) * sizeof(T)) {
        return Status::InvalidArgument("a saved " + tensor.name + " has another type");
      }
      Values& values = tensor.name == "rank_residual" ? residual : owner_residual;
      DAD_RETURN_IF_ERROR(Take(count, values));
      DAD_RETURN_IF_ERROR(Upload(*bench_, tensor.bytes, values.block.get()));
    }
    return Status::Ok();
  }
  void ReturnLast() override {
    const Values last = std::exchange(applied, {});
    if (last.count != owner_residual.count || last.count == 0) return;
    const Status status = bench_->Run<cuda::AddKeptKernel<T>>(
        {last.data(), last.count, T(1), owner_residual.data(), owner_residual.data(), nullptr});
    if (!status.ok()) {
      DAD_LOG(Error) << "a residual is lost: " << status.message();
    }
  }

  struct Values {
    int64_t count = 0;
    DeviceBlock block;
    T* data() const { return reinterpret_cast<T*>(block.get()); }
  };
  Status Take(int64_t count, Values& values) {
    Result<DeviceBlock> block = bench_->Take(static_cast<size_t>(count) * sizeof(T));
    if (!block.ok()) return block.status();
    values = {count, std::move(block).value()};
    return Status::Ok();
  }
  // Zeros, unless there is something.
  Status MakeRoom(int64_t count, Values& values) {
    if (values.block != nullptr || count == 0) return Status::Ok();
    DAD_RETURN_IF_ERROR(Take(count, values));
    return bench_->Clear(values.block.get(), static_cast<size_t>(count) * sizeof(T));
  }

  Values residual;
  Values owner_residual;  // of this rank's piece
  Values applied;         // M of this rank's piece in the last step

 private:
  void Save(const char* name, const Values& values, std::vector<StateTensor>& out) const {
    if (values.count == 0) return;
    StateTensor tensor{name, DTypeOf<T>(), {values.count}, {}};
    tensor.bytes.resize(static_cast<size_t>(values.count) * sizeof(T));
    const Status status = FetchNow(*bench_, values.block.get(), tensor.bytes);
    if (status.ok()) {
      out.push_back(std::move(tensor));
    } else {
      DAD_LOG(Error) << "a " << name << " is not saved: " << status.message();
    }
  }

  const std::shared_ptr<DeviceBench> bench_;
};

}  // namespace dad
