// Bytes and views between the host and a bench.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "exchange/device/arena.h"
#include "exchange/device/bench.h"
#include "util/gather_buffer.h"

namespace dad {

// Page-locked memory that copies of a step use: it must stay until the device is through.
class PinnedKeep {
 public:
  Result<std::byte*> Take(DeviceBench& bench, size_t num_bytes);
  // Leaves the memory to the event.
  void ReleaseAfter(DeviceBench& bench, const DeviceEvent& event);

 private:
  std::vector<std::shared_ptr<std::byte>> blocks_;
};

// Copies bytes of the host, which need not stay, to the device.
Status Upload(DeviceBench& bench, ByteSpan bytes, void* to);

// Copies from the device and waits for it: for checkpoints, on a user's thread.
Status FetchNow(DeviceBench& bench, const void* from, std::span<std::byte> to);

// Whether a method that computes in T can read and write the view where it is.
template <typename T>
bool IsNear(const TensorView& view);

// The view's values in T, after its producer: where they lie, or converted in `arena`. Null for a
// view without data.
template <typename T>
Result<const T*> ValuesOf(DeviceBench& bench, const TensorView& view, DeviceArena& arena);

// Where a sum is formed in T, and how it becomes the result.
template <typename T>
class DeviceResult {
 public:
  // Zeros: in the output itself where that has the type.
  Status Take(DeviceBench& bench, const TensorView& output, DeviceArena& arena);
  T* values() const { return values_; }
  // output = values / divisor · factor; NaN if `nothing`.
  Status Deliver(DeviceBench& bench, T divisor, T factor, bool nothing);

 private:
  TensorView output_;
  T* values_ = nullptr;
};

}  // namespace dad
