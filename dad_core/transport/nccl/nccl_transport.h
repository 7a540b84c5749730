// Messages and host memory by another transport (gloo), collectives on CUDA tensors by NCCL.
//
// Communicators meet through messages: the first member makes the id, after all have reported that
// they have the same NCCL. A rank whose connection ends takes down the communicators it is in, and
// a thread watches work in flight, so a dead peer is an error within the time that the connection
// takes to notice it, or the operation's timeout.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "dad/engine.h"
#include "transport/device_collectives.h"
#include "transport/nccl/communicator.h"
#include "transport/transport.h"

namespace dad::nccl {

class NcclTransport : public Transport, public DeviceCollectives, private MessageSink {
 public:
  // Every rank calls it. On success, `control` is taken over.
  static Result<std::unique_ptr<NcclTransport>> Connect(std::shared_ptr<const Libraries> libraries,
                                                        int device, Transport* control,
                                                        Millis timeout);
  ~NcclTransport() override;

  std::string_view name() const override { return "nccl"; }
  DeviceCollectives* device_collectives() override { return this; }
  int device() const override { return device_; }
  TransportCounters counters() const override { return control_->counters(); }
  int64_t ProgressWith(int peer) const override { return control_->ProgressWith(peer); }
  void Send(int peer, MessageHeader header, GatherBuffer payload,
            std::shared_ptr<void> keep) override;
  Status Flush(Millis timeout) override { return control_->Flush(timeout); }
  void Close() override;

  // Tensors on the CPU use the control transport. On a device, the call waits until it is done.
  Status AllReduce(const TensorView& inout, ReduceOp op, Millis timeout) override;
  Status ReduceScatter(const TensorView& in, std::span<const int64_t> counts, const TensorView& out,
                       ReduceOp op, Millis timeout) override;
  // Host memory only.
  Status AllGatherV(ByteSpan mine, std::span<const size_t> counts, std::span<std::byte> out,
                    Millis timeout) override;
  Status Broadcast(std::span<std::byte> inout, int root, Millis timeout) override;
  Status AllToAllV(ByteSpan in, std::span<const size_t> send_counts, std::span<std::byte> out,
                   std::span<const size_t> receive_counts, Millis timeout) override;
  Status SendTo(int peer, uint64_t tag, ByteSpan bytes, Millis timeout) override;
  Status ReceiveFrom(int peer, uint64_t tag, std::span<std::byte> bytes, Millis timeout) override;
  Status Barrier(Millis timeout) override;
  Result<std::vector<std::vector<std::byte>>> AllGatherBlobs(ByteSpan mine,
                                                             Millis timeout) override {
    return control_->AllGatherBlobs(mine, timeout);
  }

  Result<std::unique_ptr<DeviceGroup>> MakeGroup(uint32_t id, std::span<const int> ranks,
                                                 std::chrono::milliseconds timeout) override;

 private:
  NcclTransport(std::shared_ptr<const Libraries> libraries, int device, Transport* control);

  std::byte* Reserve(int peer, const MessageHeader& header) override;
  void Deliver(int peer, const MessageHeader& header, AlignedBuffer payload) override;
  void PeerLost(int peer, const Status& why) override;

  Result<UniqueId> Meet(uint32_t id, std::span<const int> ranks, Millis timeout);
  Result<DeviceGroup*> WorldGroup(Millis timeout);
  void WakeWatcher();
  void Forget(Communicator* communicator);
  void WatchLoop();

  const std::shared_ptr<const Libraries> libraries_;
  const int device_;
  const std::unique_ptr<Transport> control_;
  std::once_flag close_once_;

  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
  std::vector<std::pair<int, Status>> lost_;  // ranks, and how they were lost
  bool under_way_ = false;
  bool stopping_ = false;
  std::thread watcher_;

  std::mutex world_mutex_;
  std::unique_ptr<DeviceGroup> world_;  // for the blocking collectives, made when first used
};

}  // namespace dad::nccl
