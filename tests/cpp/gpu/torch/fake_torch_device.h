// Gives a torch for the CPU a device guard, an allocator and kernels for CUDA that play on the
// recording fake: memory is the host's, and an op computes on the host at once, whatever stream is
// current. Autograd believes in it, and runs backward on the streams of forward. It shows on which
// streams dad's code records, waits and allocates, and that it works on tensors that say they are
// on CUDA; not that a CUDA build of torch does the same.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <utility>
#include <vector>

#include "device_job.h"

namespace dad_torch {

c10::Stream TorchStream(const dad::UserStream& stream);

// A tensor of floats in that memory.
at::Tensor OnDevice(
    void* data, at::IntArrayRef sizes, int device,
    const std::function<void(void*)>& free = [](void*) {});
// One of its own, with these values.
at::Tensor MadeOnDevice(const at::Tensor& host, int device);
// A look at the memory of one.
at::Tensor OnHost(const at::Tensor& tensor);

// The stream that is current for the calling thread, and the one that memory was last asked for on.
int64_t CurrentStreamId(int device);
int64_t AllocatedOn();

// Memory that torch was told to keep for a stream besides its own.
using KeptFor = std::vector<std::pair<const void*, int64_t>>;
KeptFor RecordedOnStreams();

}  // namespace dad_torch
