// Streams and events of the device that a tensor is on, by way of torch's device guard: it is there
// in every build of torch, and knows CUDA only where torch does. So this compiles without CUDA's
// headers and against a torch for the CPU.
//
// The memory of a tensor belongs to the stream that it was allocated on. The core holds every
// tensor of a request until the device is through with it, and a wait makes the current stream
// wait, so record_stream() is not needed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

#include "dad/device.h"
#include "dad/request.h"
#include "dad/status.h"

namespace dad_torch {

// OK for the CPU, and for CUDA where this torch has it.
dad::Status CheckDevice(const c10::Device& device);

// The current stream of the calling thread; nothing for the CPU.
std::optional<c10::Stream> CurrentStream(const c10::Device& device);

// An event of the current stream: all that it was given so far comes before. Null for the CPU.
dad::DeviceEvent ReadyEvent(const c10::Device& device);

// Makes all views of a request ready at the current stream's present; the request keeps the event.
void SetReady(dad::Request& request);

// What the current stream is given from now on comes after the event. The host does not wait.
void WaitOnCurrentStream(const c10::Device& device, const dad::DeviceEvent& event);

// Where tensors of a device were made: their values are there when the event has passed, and their
// memory belongs to the stream.
struct MadeOn {
  c10::Stream stream;
  dad::DeviceEvent event;
};
// By what the current stream was given so far; nothing for the CPU.
std::optional<MadeOn> MadeOnCurrentStream(const c10::Device& device);
// For tensors that were kept: what the current stream is given from now on may use them, and their
// memory is not used again before it has. Undefined ones do not matter. The host does not wait.
void UseOnCurrentStream(const MadeOn& made, at::ArrayRef<at::Tensor> tensors);

// Uninitialised memory that belongs to `stream`. Safe on the worker thread: needs no GIL.
at::Tensor AllocateOn(const c10::Stream& stream, dad::DType dtype, const dad::Shape& shape);

}  // namespace dad_torch
