#include "torch_ops/device/device_stream.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <string>
#include <utility>

#include "dad/views.h"
#include "torch_ops/ops/tensor_adapter.h"

namespace dad_torch {

using c10::impl::VirtualGuardImpl;
using dad::Status;

Status CheckDevice(const c10::Device& device) {
  if (device.is_cpu()) return Status::Ok();
  if (device.is_cuda() && c10::impl::hasDeviceGuardImpl(device.type())) return Status::Ok();
  return Status::InvalidArgument("a tensor on device " + device.str() +
                                 " cannot be sent; move it to the CPU first");
}

std::optional<c10::Stream> CurrentStream(const c10::Device& device) {
  if (device.is_cpu()) return std::nullopt;
  return VirtualGuardImpl(device.type()).getStream(device);
}

dad::DeviceEvent ReadyEvent(const c10::Device& device) {
  if (device.is_cpu()) return nullptr;
  const VirtualGuardImpl impl(device.type());
  void* raw = nullptr;  // record makes it
  impl.record(&raw, impl.getStream(device), device.index(), c10::EventFlag::PYTORCH_DEFAULT);
  return dad::DeviceEvent(
      raw, [impl, index = device.index()](void* event) { impl.destroyEvent(event, index); });
}

void SetReady(dad::Request& request) {
  if (request.tensors.empty()) return;
  const dad::TensorView& first = request.tensors[0].input;
  if (first.device == dad::DeviceType::kCpu) return;
  const dad::DeviceEvent event =
      ReadyEvent(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(first.device_index)));
  for (dad::Contribution& tensor : request.tensors) {
    dad::ForEachView(tensor, [&](dad::TensorView& view, bool) {
      if (view.device != dad::DeviceType::kCpu) view.ready_event = event.get();
    });
  }
  using Both = std::pair<dad::DeviceEvent, std::shared_ptr<void>>;
  request.keep_alive = std::make_shared<Both>(event, std::move(request.keep_alive));
}

void WaitOnCurrentStream(const c10::Device& device, const dad::DeviceEvent& event) {
  if (device.is_cpu() || event == nullptr) return;
  const VirtualGuardImpl impl(device.type());
  impl.block(event.get(), impl.getStream(device));
}

std::optional<MadeOn> MadeOnCurrentStream(const c10::Device& device) {
  const std::optional<c10::Stream> stream = CurrentStream(device);
  if (!stream.has_value()) return std::nullopt;
  return MadeOn{*stream, ReadyEvent(device)};
}

void UseOnCurrentStream(const MadeOn& made, at::ArrayRef<at::Tensor> tensors) {
  const c10::Device device = made.stream.device();
  const VirtualGuardImpl impl(device.type());
  const c10::Stream current = impl.getStream(device);
  if (current == made.stream) return;
  WaitOnCurrentStream(device, made.event);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) impl.recordDataPtrOnStream(tensor.storage().data_ptr(), current);
  }
}

at::Tensor AllocateOn(const c10::Stream& stream, dad::DType dtype, const dad::Shape& shape) {
  const c10::StreamGuard guard(stream);
  return at::empty(shape, at::TensorOptions().dtype(ToScalarType(dtype)).device(stream.device()));
}

}  // namespace dad_torch
