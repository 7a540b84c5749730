#include "fake_torch_device.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

namespace dad_torch {
namespace {

using dad::CudaEvent;
using dad::CudaStream;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, int64_t> current_streams;
std::atomic<int64_t> allocated_on{0};
std::mutex kept_mutex;
KeptFor kept_for;

const dad::CudaApi& Cuda() { return *dad::ProcessCuda().value(); }
CudaStream Raw(const c10::Stream& stream) { return reinterpret_cast<CudaStream>(stream.id()); }

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  FakeGuard() = default;
  explicit FakeGuard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {c10::kCUDA, std::exchange(current_device, device.index())};
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, CurrentStreamId(device.index()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      CudaEvent made = nullptr;
      (void)Cuda().EventCreateWithFlags(&made, 0);
      *event = made;
    }
    (void)Cuda().EventRecord(static_cast<CudaEvent>(*event), Raw(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    (void)Cuda().StreamWaitEvent(Raw(stream), static_cast<CudaEvent>(event), 0);
  }
  bool queryEvent(void* event) const override {
    return Cuda().EventQuery(static_cast<CudaEvent>(event)) == dad::kCudaSuccess;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    (void)Cuda().EventDestroy(static_cast<CudaEvent>(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    const std::lock_guard<std::mutex> lock(kept_mutex);
    kept_for.emplace_back(memory.get(), stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

c10::Device Where(int device) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(device)}; }

// The host's tensor as one of the device.
at::Tensor AsDevices(const at::Tensor& host, int device) {
  return at::for_blob(host.data_ptr(), host.sizes())
      .strides(host.strides())
      .deleter([host](void*) {})
      .target_device(Where(device))
      .options(host.options().device(Where(device)))
      .make_tensor();
}

at::Tensor Empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  allocated_on = CurrentStreamId(device->index());
  return AsDevices(at::empty(sizes, at::TensorOptions().dtype(dtype.value_or(at::kFloat))),
                   device->index());
}

at::Tensor& Copy(at::Tensor& to, const at::Tensor& from, bool) {
  OnHost(to).copy_(OnHost(from));
  return to;
}

// Any op: on the host, on the same memory.
void Compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t num_arguments = schema.arguments().size();
  int device = current_device;
  std::vector<c10::IValue> given(stack->end() - static_cast<std::ptrdiff_t>(num_arguments),
                                 stack->end());
  torch::jit::drop(*stack, num_arguments);
  for (const c10::IValue& argument : given) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      if (argument.toTensor().is_cuda()) device = argument.toTensor().device().index();
      stack->push_back(OnHost(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> host;
      for (const at::Tensor& each : argument.toTensorVector()) {
        device = each.device().index();
        host.push_back(OnHost(each));
      }
      stack->push_back(std::move(host));
    } else if (argument.isDevice()) {
      stack->push_back(c10::Device(c10::kCPU));
    } else {
      stack->push_back(argument);
    }
  }
  op.callBoxed(stack);
  const size_t num_results = schema.returns().size();
  for (size_t i = 0; i < num_results; ++i) {
    c10::IValue& result = (*stack)[stack->size() - num_results + i];
    if (!result.isTensor() || !result.toTensor().defined()) continue;
    const auto* alias = schema.returns()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      result = given[i];  // in place: what was given
    } else {
      result = AsDevices(result.toTensor(), device);
    }
  }
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &Empty);
  m.impl("copy_", &Copy);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&Compute>());
}

}  // namespace
}  // namespace dad_torch

// What torch asks to know whether there is CUDA; its name is the one that torch looks for.
namespace at {
namespace {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex device) const override { return device == 0; }
  DeviceIndex deviceCount() const override { return 8; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace
}  // namespace at

namespace dad_torch {

c10::Stream TorchStream(const dad::UserStream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, Where(stream.device()),
                     reinterpret_cast<int64_t>(stream.get()));
}

at::Tensor OnDevice(void* data, at::IntArrayRef sizes, int device,
                    const std::function<void(void*)>& free) {
  return at::for_blob(data, sizes)
      .deleter(free)
      .target_device(Where(device))
      .options(at::TensorOptions().dtype(at::kFloat).device(Where(device)))
      .make_tensor();
}

at::Tensor MadeOnDevice(const at::Tensor& host, int device) {
  return AsDevices(host.detach().clone(), device);
}

at::Tensor OnHost(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([tensor](void*) {})
      .options(tensor.options().device(c10::kCPU).requires_grad(false))
      .make_tensor();
}

int64_t CurrentStreamId(int device) {
  const auto set = current_streams.find(static_cast<c10::DeviceIndex>(device));
  return set == current_streams.end() ? 0 : set->second;
}

int64_t AllocatedOn() { return allocated_on; }

KeptFor RecordedOnStreams() {
  const std::lock_guard<std::mutex> lock(kept_mutex);
  return kept_for;
}

}  // namespace dad_torch
