// Collectives on device memory, asynchronous: a call puts work on a stream of the transport's own
// and returns. Nothing here waits for a device unless asked to.
//
// Order on the device: the work starts after the ready_event of each view that it is given (the
// producer's stream has recorded it), and DeviceWork::event() comes after it: the consumer's
// stream waits for that event. The caller keeps the memory until then.
//
// Every member of a group calls the same operations in the same order. Thread-safe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "dad/request.h"
#include "dad/status.h"
#include "dad/tensor_view.h"

namespace dad {

// One operation that was put on the stream.
class DeviceWork {
 public:
  virtual ~DeviceWork() = default;

  // A cudaEvent_t, recorded; good as long as this object.
  virtual void* event() const = 0;

  // Whether it has finished, without waiting. An error if it failed, ran out of time, or a member
  // of the group is lost: the group is then dead, and the output is unspecified.
  virtual Result<bool> Done() = 0;

  // Blocks the calling thread; for tests, and for callers that need the result on the host.
  virtual Status Wait(std::chrono::milliseconds timeout) = 0;
};

// The members of a process set, each with one device.
class DeviceGroup {
 public:
  using Millis = std::chrono::milliseconds;
  using Work = Result<std::unique_ptr<DeviceWork>>;

  virtual ~DeviceGroup() = default;
  virtual int rank() const = 0;  // in the group
  virtual int size() const = 0;

  virtual int device() const = 0;
  // The cudaStream_t that operations are put on, for work that has to come right before or after
  // one, by the thread that puts them there.
  virtual void* stream() const = 0;

  // `timeout`: when the operation has not finished by then the group is aborted.
  // `out` may be `in`. `scale` other than 1: each contribution is multiplied by it first; sums and
  // averages of floating types only.
  virtual Work AllReduce(const TensorView& in, const TensorView& out, ReduceOp op, double scale,
                         Millis timeout) = 0;
  Work AllReduce(const TensorView& in, const TensorView& out, ReduceOp op, Millis timeout) {
    return AllReduce(in, out, op, 1.0, timeout);
  }
  // counts: the bytes of each member; out holds them one after the other.
  virtual Work AllGatherV(const TensorView& in, std::span<const size_t> counts,
                          const TensorView& out, Millis timeout) = 0;
  virtual Work Broadcast(const TensorView& inout, int root, Millis timeout) = 0;
  // `in` is size() blocks, with counts in elements; the sum of this member's block goes to out.
  // `scale` as for AllReduce.
  virtual Work ReduceScatter(const TensorView& in, std::span<const int64_t> counts,
                             const TensorView& out, ReduceOp op, double scale, Millis timeout) = 0;
  Work ReduceScatter(const TensorView& in, std::span<const int64_t> counts, const TensorView& out,
                     ReduceOp op, Millis timeout) {
    return ReduceScatter(in, counts, out, op, 1.0, timeout);
  }
  // Counts are in bytes.
  virtual Work AllToAllV(const TensorView& in, std::span<const size_t> send_counts,
                         const TensorView& out, std::span<const size_t> receive_counts,
                         Millis timeout) = 0;
  // Bytes to one member and bytes from it; either may be none. What one sends, the other expects.
  struct Transfer {
    int peer = 0;  // this member itself: a copy
    const void* send = nullptr;
    size_t send_bytes = 0;
    void* receive = nullptr;
    size_t receive_bytes = 0;
  };
  // All of them at once, those with one peer in the order given, after the ready_event of `views`.
  virtual Work Exchange(std::span<const Transfer> transfers, std::span<const TensorView> views,
                        Millis timeout) = 0;
  virtual Work Send(const TensorView& in, int peer, Millis timeout) = 0;
  virtual Work Receive(const TensorView& out, int peer, Millis timeout) = 0;

  // OK, or why the group is dead.
  virtual Status status() const = 0;
};

class DeviceCollectives {
 public:
  virtual ~DeviceCollectives() = default;

  // The device that this process has in every group.
  virtual int device() const = 0;

  // Meets the other members; `ranks` are ranks of the transport, the same on all of them, including
  // this one. `id` distinguishes process sets. Groups must be destroyed before the transport.
  virtual Result<std::unique_ptr<DeviceGroup>> MakeGroup(uint32_t id, std::span<const int> ranks,
                                                         std::chrono::milliseconds timeout) = 0;
};

}  // namespace dad
