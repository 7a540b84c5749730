#include "transport/mpi/mpi_transport.h"

#include <string>
#include <utility>

#include "transport/mpi/announcement.h"
#include "transport/mpi/outgoing.h"

namespace dad::mpi_transport {
namespace {

// For messages that a peer had handed to MPI before its connection ended.
constexpr std::chrono::seconds kLostGrace{2};

}  // namespace

Result<std::unique_ptr<Transport>> MpiTransport::Connect(const World& world, const Options& options,
                                                         Transport* control) {
  const auto timeout = std::chrono::duration_cast<Millis>(
      std::chrono::duration<double>(options.start_timeout_seconds));
  const auto deadline = Clock::now() + timeout;
  Result<MpiWorld*> mpi = MpiWorld::Get();
  if (!mpi.ok()) return mpi.status();
  if (mpi.value()->rank() != world.rank || mpi.value()->size() != world.size) {
    return Status::FailedPrecondition(
        "rank " + std::to_string(world.rank) + " of " + std::to_string(world.size) + " is rank " +
        std::to_string(mpi.value()->rank()) + " of " + std::to_string(mpi.value()->size()) +
        " for MPI; launch with mpirun for the mpi transport");
  }
  // A failed rank is named by the connection that it closes.
  DAD_RETURN_IF_ERROR(control->Barrier(timeout));
  Result<MPI_Comm> communicator = mpi.value()->Communicator(deadline);
  if (!communicator.ok()) return communicator.status();

  std::unique_ptr<MpiTransport> transport(
      new MpiTransport(mpi.value(), communicator.value(), control));
  control->SetSink(transport.get());
  return std::unique_ptr<Transport>(std::move(transport));
}

MpiTransport::MpiTransport(MpiWorld* world, MPI_Comm communicator, Transport* control)
    : Transport(control->rank(), control->size()),
      world_(world),
      control_(control),
      progress_(world, communicator,
                [this](int culprit, const Status& why) { OnBroken(culprit, why); }) {
  OrderedInbox::Receiver* const receiver = this;
  for (int peer = 0; peer < size(); ++peer) inboxes_.emplace_back(peer, receiver);
}

MpiTransport::~MpiTransport() { Close(); }

TransportCounters MpiTransport::counters() const {
  TransportCounters counters = control_->counters();
  counters.bytes_sent += progress_.bytes_sent();
  counters.bytes_received += progress_.bytes_received();
  return counters;
}

void MpiTransport::Send(int peer, MessageHeader header, GatherBuffer payload,
                        std::shared_ptr<void> keep) {
  if (payload.size() < kSmallestByMpi) {
    return control_->Send(peer, Marked(header, kCarriedBit), std::move(payload), std::move(keep));
  }
  if (inboxes_[peer].ended()) return;
  auto outgoing = std::make_shared<Outgoing>(std::move(payload), std::move(keep));
  Announcement announcement;
  announcement.tag = world_->NextTag();
  Transfer transfer{Transfer::Kind::kSend, peer, announcement.tag, {}, outgoing, {}};
  for (const ByteSpan part : outgoing->parts()) {
    announcement.part_bytes.push_back(part.size());
    transfer.parts.emplace_back(const_cast<std::byte*>(part.data()), part.size());
  }
  control_->Send(peer, Marked(header, kCarriedBit | kByMpiBit), Encode(announcement), nullptr);
  outgoing.reset();
  progress_.Start(std::move(transfer));
}

// Flushes the control connection first: news of an abort must not wait for a payload that nobody
// takes.
Status MpiTransport::Flush(Millis timeout) {
  const auto deadline = Clock::now() + timeout;
  DAD_RETURN_IF_ERROR(control_->Flush(timeout));
  if (const std::optional<int> peer = progress_.WaitForSends(deadline)) {
    return Status::Timeout("rank " + std::to_string(*peer) +
                           " does not receive what is sent to it");
  }
  return Status::Ok();
}

void MpiTransport::Close() {
  std::call_once(closed_, [this] {
    control_->SetSink(nullptr);
    progress_.Stop();
    if (progress_.abandoned()) {
      for (OrderedInbox& inbox : inboxes_) inbox.Forget();
    }
    control_->Close();
  });
}

std::byte* MpiTransport::Reserve(int peer, const MessageHeader& header) {
  // Payloads that have to wait for others are kept in a buffer of their own.
  if (ComesByMpi(header) || !inboxes_[peer].idle()) return nullptr;
  return ReserveFor(peer, Unmarked(header));
}

void MpiTransport::Deliver(int peer, const MessageHeader& header, AlignedBuffer payload) {
  const MessageKind kind = Unmarked(header).kind;
  if (ComesByMpi(header)) {
    Receive(peer, Unmarked(header), payload.span());
  } else if (kind == MessageKind::kPing || kind == MessageKind::kPong) {
    // Not queued behind a payload that MPI may take long to move: a slow peer is not a dead one.
    DeliverMessage(peer, Unmarked(header), std::move(payload));
  } else {
    inboxes_[peer].Add(Unmarked(header), std::move(payload));
  }
}

void MpiTransport::Receive(int peer, MessageHeader header, ByteSpan bytes) {
  OrderedInbox& inbox = inboxes_[peer];
  Result<Announcement> announcement = DecodeAnnouncement(bytes);
  if (!announcement.ok()) {
    return inbox.End(
        Status::Aborted("rank " + std::to_string(peer) + ": " + announcement.status().message()));
  }
  header.payload_bytes = announcement.value().total_bytes();
  AlignedBuffer own;
  std::byte* memory = ReserveFor(peer, header);
  if (memory == nullptr) {
    own = AlignedBuffer(header.payload_bytes);
    memory = own.data();
  }
  OrderedInbox::Entry* entry = inbox.Expect(header, std::move(own));
  if (entry == nullptr) return;
  Transfer transfer{Transfer::Kind::kReceive, peer, announcement.value().tag, {}, {}, {}};
  transfer.done = [&inbox, entry] { inbox.Complete(entry); };
  for (const uint64_t num_bytes : announcement.value().part_bytes) {
    transfer.parts.emplace_back(memory, num_bytes);
    memory += num_bytes;
  }
  progress_.Start(std::move(transfer));
}

void MpiTransport::PeerLost(int peer, const Status& why) {
  inboxes_[peer].End(why);
  progress_.GiveUpAt(peer, Clock::now() + kLostGrace);
}

void MpiTransport::OnMessage(int peer, const MessageHeader& header, AlignedBuffer payload) {
  DeliverMessage(peer, header, std::move(payload));
}

void MpiTransport::OnEnd(int peer, const Status& why) { ReportLost(peer, why); }

// The culprit first, because it is the one to blame.
void MpiTransport::OnBroken(int culprit, const Status& why) {
  inboxes_[culprit].Break(why);
  for (OrderedInbox& inbox : inboxes_) {
    if (!inbox.idle()) inbox.Break(Status::Aborted("MPI was given up: " + why.message()));
  }
}

}  // namespace dad::mpi_transport
