#include "transport/mpi/progress.h"

#include <algorithm>
#include <string>
#include <utility>

#include "util/log.h"

namespace dad::mpi_transport {
namespace {

// A transfer within a host takes few polls, and a pause would be noticeable; over a network it
// takes many, and the cores are needed by others.
constexpr int kPollsWithoutPause = 200;
constexpr std::chrono::microseconds kPause{50};
// MPI works only while it is called. A peer whose message we have may wait for a last word that MPI
// could not send at once, so MPI is called for a while longer.
constexpr std::chrono::milliseconds kLinger{100};
constexpr std::chrono::milliseconds kLingerPause{1};
// Peers that have our messages may report that only after they have said goodbye.
constexpr std::chrono::seconds kStopGrace{3};
// Time alone does not count: on a busy machine this thread may not have run at all.
constexpr int kLastPolls = 2000;

std::string Rank(int peer) { return "rank " + std::to_string(peer) + ": "; }

}  // namespace

bool Progress::Patience::IsOver() { return Clock::now() > deadline && ++polls_since > kLastPolls; }

Progress::Progress(MpiWorld* world, MPI_Comm communicator, Broken broken)
    : world_(world), communicator_(communicator), broken_(std::move(broken)) {
  world_->AddUser();
  thread_ = std::thread([this] { Run(); });
}

void Progress::Start(Transfer transfer) {
  auto started = std::make_shared<Transfer>(std::move(transfer));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    if (started->kind == Transfer::Kind::kSend) ++open_sends_[started->peer];
    queue_.push_back(std::move(started));
  }
  work_.notify_one();
}

void Progress::GiveUpAt(int peer, Clock::time_point deadline) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    given_up_.emplace(peer, Patience{deadline});
  }
  sent_.notify_all();
}

std::optional<int> Progress::AwaitedPeerLocked() const {
  if (closed_) return std::nullopt;
  for (const auto& [peer, count] : open_sends_) {
    if (count > 0 && !given_up_.contains(peer)) return peer;
  }
  return std::nullopt;
}

std::optional<int> Progress::WaitForSends(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  sent_.wait_until(lock, deadline, [&] { return !AwaitedPeerLocked().has_value(); });
  return AwaitedPeerLocked();
}

void Progress::Stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  work_.notify_one();
  sent_.notify_all();
  thread_.join();
  world_->RemoveUser();
}

void Progress::Run() {
  std::vector<std::shared_ptr<Transfer>> started;
  while (WaitForWork(&started)) {
    for (const std::shared_ptr<Transfer>& transfer : started) Post(transfer);
    started.clear();
    Poll();
    CheckDeadlines();
  }
  if (!abandoned_) WindDown();
}

bool Progress::WaitForWork(std::vector<std::shared_ptr<Transfer>>* started) {
  const bool pause = idle_polls_ > kPollsWithoutPause;
  if (!requests_.empty() && !pause) std::this_thread::yield();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto called = [&] { return closed_ || !queue_.empty(); };
  if (requests_.empty() && Clock::now() < last_finished_ + kLinger) {
    work_.wait_for(lock, kLingerPause, called);
  } else if (requests_.empty()) {
    work_.wait(lock, called);
  } else if (pause) {
    work_.wait_for(lock, kPause, called);
  }
  started->swap(queue_);
  return !closed_;
}

void Progress::Post(const std::shared_ptr<Transfer>& transfer) {
  if (abandoned_) return;
  transfer->parts_left = transfer->parts.size();
  for (const std::span<std::byte> part : transfer->parts) {
    const bool is_send = transfer->kind == Transfer::Kind::kSend;
    const int num_bytes = static_cast<int>(part.size());
    MPI_Request request = MPI_REQUEST_NULL;
    const Status posted = is_send
                              ? CheckMpi(MPI_Isend(part.data(), num_bytes, MPI_BYTE, transfer->peer,
                                                   transfer->tag, communicator_, &request),
                                         "MPI_Isend")
                              : CheckMpi(MPI_Irecv(part.data(), num_bytes, MPI_BYTE, transfer->peer,
                                                   transfer->tag, communicator_, &request),
                                         "MPI_Irecv");
    if (!posted.ok()) return Break(transfer->peer, posted);
    if (is_send) bytes_sent_ += num_bytes;
    requests_.push_back(request);
    parts_.push_back({transfer, num_bytes});
  }
  idle_polls_ = 0;
}

void Progress::Nudge() {
  int found = 0;
  MPI_Status status;
  (void)MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, communicator_, &found, &status);
}

void Progress::Poll() {
  if (requests_.empty()) {
    if (Clock::now() < last_finished_ + kLinger) Nudge();
    return;
  }
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int count = 0;
  const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                                indices_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
    return Break(parts_.front().transfer->peer, CheckMpi(code, "MPI_Testsome"));
  }
  if (count == MPI_UNDEFINED || count == 0) {
    ++idle_polls_;
    return;
  }
  idle_polls_ = 0;
  last_finished_ = Clock::now();
  std::vector<Part> finished(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    finished[i] = std::move(parts_[indices_[i]]);
    if (code == MPI_ERR_IN_STATUS && statuses_[i].MPI_ERROR != MPI_SUCCESS) {
      return Break(finished[i].transfer->peer, CheckMpi(statuses_[i].MPI_ERROR, "MPI"));
    }
  }
  // Testsome has set finished requests to null.
  std::erase_if(parts_, [](const Part& part) { return part.transfer == nullptr; });
  std::erase(requests_, MPI_REQUEST_NULL);
  for (int i = 0; i < count && !abandoned_; ++i) {
    FinishPart(std::move(finished[i]), statuses_[i]);
  }
}

void Progress::FinishPart(Part part, const MPI_Status& status) {
  const std::shared_ptr<Transfer>& transfer = part.transfer;
  if (transfer->kind == Transfer::Kind::kReceive && !winding_down_) {
    int num_bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &num_bytes);
    if (num_bytes != part.num_bytes) {
      return Break(transfer->peer, Status::Aborted("sent less than it had announced"));
    }
    bytes_received_ += num_bytes;
  }
  if (--transfer->parts_left == 0) Finish(transfer);
}

void Progress::Finish(const std::shared_ptr<Transfer>& transfer) {
  transfer->keep.reset();
  if (transfer->done && !winding_down_) transfer->done();
  if (transfer->kind != Transfer::Kind::kSend) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --open_sends_[transfer->peer];
  }
  sent_.notify_all();
}

void Progress::CheckDeadlines() {
  std::optional<int> overdue;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (given_up_.empty()) return;
    for (auto& [peer, patience] : given_up_) {
      const auto with_peer = [&](const Part& part) { return part.transfer->peer == peer; };
      if (std::ranges::any_of(parts_, with_peer) && patience.IsOver()) overdue = peer;
    }
  }
  if (overdue) Break(*overdue, Status::Aborted("left while MPI was moving data"));
}

void Progress::Break(int peer, const Status& why) {
  Abandon(Rank(peer) + why.message());
  if (!winding_down_) broken_(peer, Status::Aborted(Rank(peer) + why.message()));
}

void Progress::WindDown() {
  winding_down_ = true;
  for (size_t i = 0; i < requests_.size(); ++i) {
    // Works as long as the peer has not begun to send.
    if (parts_[i].transfer->kind == Transfer::Kind::kReceive) MPI_Cancel(&requests_[i]);
  }
  Patience patience{Clock::now() + kStopGrace};
  while (!requests_.empty() && !patience.IsOver()) {
    Poll();
    if (idle_polls_ > kPollsWithoutPause) std::this_thread::sleep_for(kPause);
  }
  if (!requests_.empty()) return Abandon("closed before all messages were through");
  while (Clock::now() < last_finished_ + kLinger) {
    Nudge();
    std::this_thread::sleep_for(kLingerPause);
  }
}

void Progress::Abandon(const std::string& why) {
  std::string open;
  for (const Part& part : parts_) {
    const bool is_send = part.transfer->kind == Transfer::Kind::kSend;
    open += (is_send ? ", to rank " : ", from rank ") + std::to_string(part.transfer->peer);
  }
  DAD_LOG(Warning) << "MPI is given up for good: " << why << open;
  world_->Abandon();
  abandoned_ = true;
  std::vector<std::shared_ptr<Transfer>> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    dropped.swap(queue_);
  }
  sent_.notify_all();
  requests_.clear();
  parts_.clear();
}

}  // namespace dad::mpi_transport
