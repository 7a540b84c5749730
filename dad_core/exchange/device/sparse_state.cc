#include "exchange/device/sparse_state.h"

#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "exchange/by_method.h"
#include "exchange/device/transfer.h"
#include "util/log.h"

namespace dad {

template <typename T>
Status AddWords(DeviceBench& bench, const SparseSettings& settings, const uint32_t* words,
                int64_t count, const T* values, T* out) {
  if (count == 0) return Status::Ok();
  typename cuda::AddWordsKernel<T>::Args add{};
  add.words = words;
  add.count = count;
  add.value_bits = settings.value_bits();
  for (int code = 0; code < 16; ++code) add.values[code] = values[code];
  add.out = out;
  return bench.Run<cuda::AddWordsKernel<T>>(add);
}

template <typename T>
void DeviceSparseState<T>::Save(const char* name, DType dtype, int64_t count,
                                const DeviceBlock& values, std::vector<StateTensor>& out) const {
  if (values == nullptr) return;
  StateTensor tensor{name, dtype, {count}, {}};
  tensor.bytes.resize(static_cast<size_t>(count) * SizeOf(dtype));
  if (const Status status = FetchNow(*bench_, values.get(), tensor.bytes); !status.ok()) {
    DAD_LOG(Error) << "a " << name << " could not be copied from the device: " << status.message();
    return;
  }
  out.push_back(std::move(tensor));
}

template <typename T>
void DeviceSparseState<T>::Export(std::vector<StateTensor>& out) {
  Save("residual", DTypeOf<T>(), settings_.count(), r, out);
  Save("variance", DTypeOf<T>(), settings_.count(), v, out);
  if (settings_.has_tau() && !settings_.absolute()) {
    Save("tau", DType::kFloat64, 2, mean_rms, out);
  }
}

template <typename T>
Status DeviceSparseState<T>::Import(const std::vector<StateTensor>& tensors) {
  DAD_RETURN_IF_ERROR(MakeRoom());
  for (const StateTensor& tensor : tensors) {
    const bool tau = tensor.name == "tau";
    const size_t expected = tau ? 2 * sizeof(double) : num_bytes();
    if (tensor.dtype != (tau ? DType::kFloat64 : DTypeOf<T>()) || tensor.bytes.size() != expected) {
      return Status::InvalidArgument("a saved " + tensor.name + " of " +
                                     std::to_string(tensor.bytes.size()) + " bytes, expected " +
                                     std::to_string(expected));
    }
    const DeviceBlock& to = tau ? mean_rms : tensor.name == "variance" ? v : r;
    if (to == nullptr) continue;
    DAD_RETURN_IF_ERROR(Upload(*bench_, tensor.bytes, to.get()));
  }
  return Status::Ok();
}

template <typename T>
void DeviceSparseState<T>::ReturnLast() {
  for (const DeviceWords<T>& sent : std::exchange(last, {})) {
    const Status status =
        AddWords(*bench_, settings_, reinterpret_cast<const uint32_t*>(sent.words.get()),
                 sent.count, sent.values, r_values() + sent.begin);
    if (!status.ok()) {
      DAD_LOG(Error) << "a residual is lost: " << status.message();
    }
  }
}

template <typename T>
Status DeviceSparseState<T>::MakeRoom() {
  if (mean_rms != nullptr) return Status::Ok();
  const auto zeros = [&](size_t bytes, DeviceBlock& to) -> Status {
    Result<DeviceBlock> block = bench_->Take(bytes);
    if (!block.ok()) return block.status();
    to = std::move(block).value();
    return bench_->Clear(to.get(), bytes);
  };
  DAD_RETURN_IF_ERROR(zeros(num_bytes(), r));
  if (settings_.has_variance()) DAD_RETURN_IF_ERROR(zeros(num_bytes(), v));
  return zeros(2 * sizeof(double), mean_rms);  // the last: it says that all are there
}

#define DAD_INSTANTIATE(T)                                                                   \
  template Status AddWords<T>(DeviceBench&, const SparseSettings&, const uint32_t*, int64_t, \
                              const T*, T*);                                                 \
  template class DeviceSparseState<T>
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
