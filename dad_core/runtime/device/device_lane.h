// The device work of one process set through NCCL: batches whose order the ranks have agreed on
// (exchange/collective/order.h) are enqueued on the device in that order. A thread of its own does
// it, because meeting the other members, and sometimes enqueueing an operation, takes a while, and
// the worker never waits for a peer.
//
// Tensors of a batch that have the same type and operation share a buffer: the stream waits for the
// ready_event of each, copies them into it, reduces, and copies them back. Point-to-point transfers
// (an alltoall, or an allgather of unequal parts) form one group of sends and receives for all
// tensors of the batch. At the end the event that the tickets give is
// recorded. Nothing waits on the host.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "dad/device.h"
#include "device/cuda_api.h"
#include "exchange/exchange.h"
#include "runtime/device/device_packer.h"
#include "runtime/request_state.h"
#include "transport/device_collectives.h"
#include "util/mutex.h"

namespace dad {

struct DeviceTask {
  struct Part {
    DeviceTurn turn;
    std::shared_ptr<RequestState> request;  // null: this rank has joined
    int tensor = 0;

    const TensorSpec& spec() const { return turn.spec; }
  };
  uint64_t batch = 0;
  uint64_t turn = 0;         // the turn of its first part
  bool some_absent = false;  // some member has joined
  std::vector<Part> parts;
};

// The result of a task. kInvalidArgument is the same on all members and ends only the requests; any
// other error ends the engine.
struct DeviceOutcome {
  Status status;
  DeviceEvent done;
  DeviceTask task;  // goes back to the worker, which alone releases requests
};

class DeviceLane {
 public:
  using Millis = std::chrono::milliseconds;
  using Report = std::function<void(DeviceOutcome)>;
  // `broken` is called once, by the thread, when work that was reported as under way has failed.
  using Broken = std::function<void(const Status&)>;

  DeviceLane(uint32_t id, std::vector<int> ranks, DeviceCollectives* collectives,
             Millis start_timeout, Millis timeout, Report report, Broken broken);
  // Drops work that has not begun; waits a moment for work that is on the device.
  ~DeviceLane();
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  // May be called in any order: the task waits for its turn.
  void Put(DeviceTask task);

  // Begins nothing more, because the memory of waiting tasks may be freed at any time. Does not
  // wait.
  void Stop();

  // Whether something remains to be done, or is on the device and not known to be finished.
  bool busy() const { return busy_.load(std::memory_order_acquire); }

 private:
  void Loop();
  bool IsMyTurn() const REQUIRES(mutex_);
  Status Prepare();
  Result<DeviceEvent> Run(const DeviceTask& task);
  Status AllReduce(std::span<const DeviceTask::Part* const> parts, bool some_absent);
  Status Broadcast(const DeviceTask::Part& part);
  Status ReduceScatter(const DeviceTask::Part& part, bool some_absent);
  Status AllGather(const DeviceTask::Part& part);
  Status Exchange(std::span<const DeviceTask::Part* const> parts);
  // A view of a tensor in the buffer below.
  Result<TensorView> Scratch(DType dtype, const Shape& shape);
  Result<std::byte*> Buffer(size_t num_bytes);
  Status WaitFor(const TensorView& view);
  Status Copy(void* to, const void* from, size_t num_bytes);
  Status Note(DeviceGroup::Work work);

  const uint32_t id_;
  const std::vector<int> ranks_;
  DeviceCollectives* const collectives_;
  const Millis start_timeout_;
  const Millis timeout_;
  const Report report_;
  const Broken broken_;

  Mutex mutex_;
  Condition changed_;
  std::map<uint64_t, DeviceTask> waiting_ GUARDED_BY(mutex_);  // by turn
  uint64_t next_turn_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> busy_{false};

  // Used by the thread only.
  const CudaApi* cuda_ = nullptr;
  std::unique_ptr<DeviceGroup> group_;
  CudaStream stream_ = nullptr;
  std::optional<DevicePacker> packer_;
  void* buffer_ = nullptr;  // on the device; the stream's order lets batches share it
  size_t buffer_bytes_ = 0;
  std::unique_ptr<DeviceWork> last_;  // the last work that is under way

  std::thread thread_;
};

}  // namespace dad
