// Moves large payloads by MPI; everything else goes over a control transport that is connected
// already. So a dead peer is noticed, which MPI cannot do, and a message needs no posted receive,
// because its header arrives over the control connection and requests one.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string_view>

#include "dad/engine.h"
#include "transport/mpi/mpi_world.h"
#include "transport/mpi/ordered_inbox.h"
#include "transport/mpi/progress.h"
#include "transport/transport.h"

namespace dad::mpi_transport {

class MpiTransport final : public Transport, private MessageSink, private OrderedInbox::Receiver {
 public:
  // Takes over `control` on success.
  static Result<std::unique_ptr<Transport>> Connect(const World& world, const Options& options,
                                                    Transport* control);
  ~MpiTransport() override;

  std::string_view name() const override { return "mpi"; }
  TransportCounters counters() const override;
  int64_t ProgressWith(int peer) const override { return control_->ProgressWith(peer); }
  void Send(int peer, MessageHeader header, GatherBuffer payload,
            std::shared_ptr<void> keep) override;
  Status Flush(Millis timeout) override;
  void Close() override;

 private:
  MpiTransport(MpiWorld* world, MPI_Comm communicator, Transport* control);

  // From the control transport.
  std::byte* Reserve(int peer, const MessageHeader& header) override;
  void Deliver(int peer, const MessageHeader& header, AlignedBuffer payload) override;
  void PeerLost(int peer, const Status& why) override;

  // From the inboxes.
  void OnMessage(int peer, const MessageHeader& header, AlignedBuffer payload) override;
  void OnEnd(int peer, const Status& why) override;

  void Receive(int peer, MessageHeader header, ByteSpan announcement);
  void OnBroken(int culprit, const Status& why);

  MpiWorld* const world_;
  const std::unique_ptr<Transport> control_;
  std::deque<OrderedInbox> inboxes_;  // by peer
  std::once_flag closed_;
  Progress progress_;  // last: its thread uses the others
};

}  // namespace dad::mpi_transport
