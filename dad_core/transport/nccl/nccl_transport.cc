#include "transport/nccl/nccl_transport.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "transport/nccl/nccl_group.h"

namespace dad::nccl {
namespace {

// Pause between two checks of work in flight; an NCCL error is found this late.
constexpr std::chrono::milliseconds kLook{10};

constexpr uint64_t kMeetTag = uint64_t{1} << 62;  // plus the number of the group
constexpr uint32_t kWorldGroup = 0xffffffff;

// What members tell the first one, and its answer. As it lies in memory: ranks of one job run the
// same build.
struct MeetMessage {
  int32_t version = 0;
  int32_t failed = 0;
  UniqueId id{};
  char why[256] = "";
};

template <typename T>
ByteSpan BytesOf(const T& value) {
  return {reinterpret_cast<const std::byte*>(&value), sizeof value};
}
template <typename T>
std::span<std::byte> WritableBytesOf(T& value) {
  return {reinterpret_cast<std::byte*>(&value), sizeof value};
}

}  // namespace

Result<std::unique_ptr<NcclTransport>> NcclTransport::Connect(
    std::shared_ptr<const Libraries> libraries, int device, Transport* control, Millis timeout) {
  const Result<int> devices = CountCudaDevices(libraries->cuda);
  if (!devices.ok()) return devices.status();
  if (device < 0 || device >= devices.value()) {
    return Status::Unavailable("rank " + std::to_string(control->rank()) + " needs CUDA device " +
                               std::to_string(device) + ", there are " +
                               std::to_string(devices.value()) + " on its host");
  }
  // A failed rank is named by the connection that it closes.
  DAD_RETURN_IF_ERROR(control->Barrier(timeout));
  std::unique_ptr<NcclTransport> transport(
      new NcclTransport(std::move(libraries), device, control));
  control->SetSink(transport.get());
  return transport;
}

NcclTransport::NcclTransport(std::shared_ptr<const Libraries> libraries, int device,
                             Transport* control)
    : Transport(control->rank(), control->size()),
      libraries_(std::move(libraries)),
      device_(device),
      control_(control),
      watcher_([this] { WatchLoop(); }) {}

NcclTransport::~NcclTransport() { Close(); }

void NcclTransport::Close() {
  std::call_once(close_once_, [this] {
    {
      const std::lock_guard<std::mutex> lock(world_mutex_);
      world_.reset();
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      // Groups that the user still has; they cannot be used from here on.
      for (const auto& communicator : communicators_) {
        communicator->Break(Status::Aborted("the transport was closed"));
      }
    }
    work_.notify_all();
    watcher_.join();
    control_->SetSink(nullptr);
    control_->Close();
  });
}

void NcclTransport::Send(int peer, MessageHeader header, GatherBuffer payload,
                         std::shared_ptr<void> keep) {
  control_->Send(peer, header, std::move(payload), std::move(keep));
}

std::byte* NcclTransport::Reserve(int peer, const MessageHeader& header) {
  return ReserveFor(peer, header);
}

void NcclTransport::Deliver(int peer, const MessageHeader& header, AlignedBuffer payload) {
  DeliverMessage(peer, header, std::move(payload));
}

// An abort takes a while, so the watcher does it.
void NcclTransport::PeerLost(int peer, const Status& why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    lost_.emplace_back(peer, why);
    under_way_ = true;
  }
  work_.notify_all();
  ReportLost(peer, why);
}

// ---- Host memory.

Status NcclTransport::AllGatherV(ByteSpan mine, std::span<const size_t> counts,
                                 std::span<std::byte> out, Millis timeout) {
  return control_->AllGatherV(mine, counts, out, timeout);
}
Status NcclTransport::Broadcast(std::span<std::byte> inout, int root, Millis timeout) {
  return control_->Broadcast(inout, root, timeout);
}
Status NcclTransport::AllToAllV(ByteSpan in, std::span<const size_t> send_counts,
                                std::span<std::byte> out, std::span<const size_t> receive_counts,
                                Millis timeout) {
  return control_->AllToAllV(in, send_counts, out, receive_counts, timeout);
}
Status NcclTransport::SendTo(int peer, uint64_t tag, ByteSpan bytes, Millis timeout) {
  return control_->SendTo(peer, tag, bytes, timeout);
}
Status NcclTransport::ReceiveFrom(int peer, uint64_t tag, std::span<std::byte> bytes,
                                  Millis timeout) {
  return control_->ReceiveFrom(peer, tag, bytes, timeout);
}
Status NcclTransport::Barrier(Millis timeout) { return control_->Barrier(timeout); }

// ---- Either.

Status NcclTransport::AllReduce(const TensorView& inout, ReduceOp op, Millis timeout) {
  if (inout.device == DeviceType::kCpu) return control_->AllReduce(inout, op, timeout);
  const Result<DeviceGroup*> world = WorldGroup(timeout);
  if (!world.ok()) return world.status();
  const DeviceGroup::Work work = world.value()->AllReduce(inout, inout, op, timeout);
  return work.ok() ? work.value()->Wait(timeout) : work.status();
}

Status NcclTransport::ReduceScatter(const TensorView& in, std::span<const int64_t> counts,
                                    const TensorView& out, ReduceOp op, Millis timeout) {
  if (in.device == DeviceType::kCpu && out.device == DeviceType::kCpu) {
    return control_->ReduceScatter(in, counts, out, op, timeout);
  }
  const Result<DeviceGroup*> world = WorldGroup(timeout);
  if (!world.ok()) return world.status();
  const DeviceGroup::Work work = world.value()->ReduceScatter(in, counts, out, op, timeout);
  return work.ok() ? work.value()->Wait(timeout) : work.status();
}

Result<DeviceGroup*> NcclTransport::WorldGroup(Millis timeout) {
  const std::lock_guard<std::mutex> lock(world_mutex_);
  if (world_ == nullptr) {
    std::vector<int> ranks(static_cast<size_t>(size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    Result<std::unique_ptr<DeviceGroup>> group = MakeGroup(kWorldGroup, ranks, timeout);
    if (!group.ok()) return group.status();
    world_ = std::move(group).value();
  }
  return world_.get();
}

// ---- Groups.

Result<std::unique_ptr<DeviceGroup>> NcclTransport::MakeGroup(uint32_t id,
                                                              std::span<const int> ranks,
                                                              std::chrono::milliseconds timeout) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank());
  if (mine == ranks.end()) {
    return Status::InvalidArgument("rank " + std::to_string(rank()) +
                                   " is no member of the process set");
  }
  const auto deadline = Clock::now() + timeout;
  const Result<UniqueId> unique = Meet(id, ranks, timeout);
  if (!unique.ok()) return unique.status();
  const auto communicator = std::make_shared<Communicator>(
      libraries_, device_, std::vector<int>(ranks.begin(), ranks.end()),
      static_cast<int>(mine - ranks.begin()));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return Status::Aborted("the transport was closed");
    for (const auto& [peer, why] : lost_) {
      if (communicator->Has(peer)) return why;
    }
    communicators_.push_back(communicator);
  }
  const Status started = communicator->Start(
      unique.value(), std::chrono::duration_cast<Millis>(deadline - Clock::now()));
  if (!started.ok()) {
    Forget(communicator.get());
    return started;
  }
  return std::unique_ptr<DeviceGroup>(std::make_unique<NcclGroup>(
      libraries_, communicator, [this] { WakeWatcher(); },
      [this](Communicator* gone) { Forget(gone); }));
}

Result<UniqueId> NcclTransport::Meet(uint32_t id, std::span<const int> ranks, Millis timeout) {
  const uint64_t tag = kMeetTag | id;
  const int first = ranks.front();
  MeetMessage mine;
  mine.version = libraries_->nccl.version;
  if (rank() != first) {
    MeetMessage answer;
    DAD_RETURN_IF_ERROR(control_->SendTo(first, tag, BytesOf(mine), timeout));
    DAD_RETURN_IF_ERROR(control_->ReceiveFrom(first, tag, WritableBytesOf(answer), timeout));
    answer.why[sizeof answer.why - 1] = '\0';
    if (answer.failed != 0) return Status::Unavailable(answer.why);
    return answer.id;
  }
  for (const int peer : ranks) {
    if (peer == rank()) continue;
    MeetMessage theirs;
    DAD_RETURN_IF_ERROR(control_->ReceiveFrom(peer, tag, WritableBytesOf(theirs), timeout));
    if (theirs.version != mine.version && mine.failed == 0) {
      mine.failed = 1;
      std::snprintf(mine.why, sizeof mine.why,
                    "rank %d has NCCL %s, rank %d has %s: all need the same", peer,
                    VersionText(theirs.version).c_str(), rank(), VersionText(mine.version).c_str());
    }
  }
  if (mine.failed == 0) {
    const ResultCode code = libraries_->nccl.GetUniqueId(&mine.id);
    if (code != kSuccess) {
      mine.failed = 1;
      std::snprintf(mine.why, sizeof mine.why, "rank %d: ncclGetUniqueId: %s", rank(),
                    libraries_->nccl.GetErrorString(code));
    }
  }
  for (const int peer : ranks) {
    if (peer != rank()) DAD_RETURN_IF_ERROR(control_->SendTo(peer, tag, BytesOf(mine), timeout));
  }
  if (mine.failed != 0) return Status::Unavailable(mine.why);
  return mine.id;
}

void NcclTransport::Forget(Communicator* communicator) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(communicators_, [&](const auto& each) { return each.get() == communicator; });
}

// ---- The watcher.

void NcclTransport::WakeWatcher() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    under_way_ = true;
  }
  work_.notify_all();
}

// Sleeps while nothing is under way.
void NcclTransport::WatchLoop() {
  std::unique_lock<std::mutex> lock(mutex_);
  size_t lost_seen = 0;
  while (!stopping_) {
    if (!under_way_) {
      work_.wait(lock, [this] { return under_way_ || stopping_; });
      continue;
    }
    under_way_ = false;
    lost_seen = lost_.size();
    const std::vector<std::shared_ptr<Communicator>> all = communicators_;
    const std::vector<std::pair<int, Status>> lost = lost_;
    lock.unlock();
    bool busy = false;
    for (const auto& communicator : all) {
      for (const auto& [peer, why] : lost) {
        if (communicator->Has(peer)) communicator->Break(why);
      }
      busy = communicator->Watch() || busy;
    }
    lock.lock();
    under_way_ = under_way_ || busy;
    if (under_way_) {
      work_.wait_for(lock, kLook, [&] { return stopping_ || lost_.size() != lost_seen; });
    }
  }
}

}  // namespace dad::nccl
