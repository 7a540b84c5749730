#include "exchange/device/transfer.h"

#include <chrono>
#include <cstring>
#include <type_traits>
#include <utility>

#include "exchange/by_method.h"

namespace dad {
namespace {

using NarrowKernel = cuda::ResultKernel<double, float>;

}  // namespace

Result<std::byte*> PinnedKeep::Take(DeviceBench& bench, size_t num_bytes) {
  Result<std::shared_ptr<std::byte>> block = bench.TakePinned(num_bytes);
  if (!block.ok()) return block.status();
  blocks_.push_back(std::move(block).value());
  return blocks_.back().get();
}

void PinnedKeep::ReleaseAfter(DeviceBench& bench, const DeviceEvent& event) {
  for (auto& block : std::exchange(blocks_, {})) bench.KeepPinned(event, std::move(block));
}

Status Upload(DeviceBench& bench, ByteSpan bytes, void* to) {
  if (bytes.empty()) return Status::Ok();
  PinnedKeep keep;
  const Result<std::byte*> pinned = keep.Take(bench, bytes.size());
  if (!pinned.ok()) return pinned.status();
  std::memcpy(pinned.value(), bytes.data(), bytes.size());
  DAD_RETURN_IF_ERROR(bench.Copy(to, pinned.value(), bytes.size()));
  const Result<DeviceEvent> event = bench.Record();
  if (!event.ok()) return event.status();
  keep.ReleaseAfter(bench, event.value());
  return Status::Ok();
}

Status FetchNow(DeviceBench& bench, const void* from, std::span<std::byte> to) {
  constexpr std::chrono::minutes kPatience{1};
  if (to.empty()) return Status::Ok();
  PinnedKeep keep;
  const Result<std::byte*> pinned = keep.Take(bench, to.size());
  if (!pinned.ok()) return pinned.status();
  DAD_RETURN_IF_ERROR(bench.Copy(pinned.value(), from, to.size()));
  const Result<DeviceEvent> event = bench.Record();
  if (!event.ok()) return event.status();
  const Status passed = WaitForEvent(bench.device(), event.value(), kPatience);
  if (passed.ok()) std::memcpy(to.data(), pinned.value(), to.size());
  keep.ReleaseAfter(bench, event.value());
  return passed;
}

template <typename T>
bool IsNear(const TensorView& view) {
  if (view.data == nullptr || view.dtype == DTypeOf<T>()) return true;
  return DTypeOf<T>() == DType::kFloat32 &&
         (view.dtype == DType::kFloat16 || view.dtype == DType::kBFloat16);
}

template <typename T>
Result<const T*> ValuesOf(DeviceBench& bench, const TensorView& view, DeviceArena& arena) {
  const T* none = nullptr;
  if (view.data == nullptr) return none;
  DAD_RETURN_IF_ERROR(bench.WaitFor(view));
  if (view.dtype == DTypeOf<T>()) return static_cast<const T*>(view.data);
  if constexpr (std::is_same_v<T, float>) {
    const int64_t count = view.num_elements();
    auto* wide = arena.Take<float>(bench, count);
    DAD_RETURN_IF_ERROR(arena.status());
    if (view.dtype == DType::kFloat16) {
      DAD_RETURN_IF_ERROR(bench.Run<cuda::WidenKernel<cuda::Half>>(
          {static_cast<const cuda::Half*>(view.data), count, wide}));
      return static_cast<const T*>(wide);
    }
    if (view.dtype == DType::kBFloat16) {
      DAD_RETURN_IF_ERROR(bench.Run<cuda::WidenKernel<cuda::BFloat16>>(
          {static_cast<const cuda::BFloat16*>(view.data), count, wide}));
      return static_cast<const T*>(wide);
    }
    if (view.dtype == DType::kFloat64) {
      DAD_RETURN_IF_ERROR(bench.Run<NarrowKernel>(
          {static_cast<const double*>(view.data), count, 1, 1, false, wide}));
      return static_cast<const T*>(wide);
    }
  }
  return Status::Internal(std::string("a device tensor of type ") + Name(view.dtype));
}

template <typename T>
Status DeviceResult<T>::Take(DeviceBench& bench, const TensorView& output, DeviceArena& arena) {
  output_ = output;
  values_ = nullptr;
  const int64_t count = output.num_elements();
  if (output.data == nullptr || count == 0) return Status::Ok();
  DAD_RETURN_IF_ERROR(bench.WaitFor(output));
  values_ =
      output.dtype == DTypeOf<T>() ? static_cast<T*>(output.data) : arena.Take<T>(bench, count);
  DAD_RETURN_IF_ERROR(arena.status());
  return bench.Clear(values_, static_cast<size_t>(count) * sizeof(T));
}

template <typename T>
Status DeviceResult<T>::Deliver(DeviceBench& bench, T divisor, T factor, bool nothing) {
  if (values_ == nullptr) return Status::Ok();
  const int64_t count = output_.num_elements();
  if (output_.dtype == DTypeOf<T>()) {
    if (divisor == T(1) && factor == T(1) && !nothing) return Status::Ok();
    return bench.Run<cuda::ResultKernel<T, T>>(
        {values_, count, divisor, factor, nothing, static_cast<T*>(output_.data)});
  }
  if constexpr (std::is_same_v<T, float>) {
    if (output_.dtype == DType::kFloat16) {
      return bench.Run<cuda::ResultKernel<float, cuda::Half>>(
          {values_, count, divisor, factor, nothing, static_cast<cuda::Half*>(output_.data)});
    }
    if (output_.dtype == DType::kBFloat16) {
      return bench.Run<cuda::ResultKernel<float, cuda::BFloat16>>(
          {values_, count, divisor, factor, nothing, static_cast<cuda::BFloat16*>(output_.data)});
    }
  }
  return Status::Internal(std::string("a device tensor of type ") + Name(output_.dtype));
}

#define DAD_INSTANTIATE(T)                                                              \
  template bool IsNear<T>(const TensorView&);                                           \
  template Result<const T*> ValuesOf<T>(DeviceBench&, const TensorView&, DeviceArena&); \
  template class DeviceResult<T>
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
