#include "transport/local/hub.h"

#include <algorithm>
#include <utility>

namespace dad::local {

void Hub::Attach(int rank, Inbox* inbox) {
  std::lock_guard<std::mutex> lock(mutex_);
  Rank& self = ranks_[rank];
  self.inbox = inbox;
  for (Parcel& parcel : std::exchange(self.waiting, {})) inbox->Put(std::move(parcel));
}

void Hub::Detach(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank].inbox = nullptr;  // first: this rank's own end is not a loss
  KillLocked(rank);
}

bool Hub::Send(int from, int to, const MessageHeader& header, AlignedBuffer payload) {
  std::lock_guard<std::mutex> lock(mutex_);
  Rank& sender = ranks_[from];
  if (sender.alive && sender.sends_left == 0) KillLocked(from);
  if (!sender.alive) return false;
  if (sender.sends_left > 0) --sender.sends_left;
  if (sender.silent || !ranks_[to].alive) return true;
  PutLocked(to, {DueLocked(from, to), next_order_++, from, false, header, std::move(payload)});
  return true;
}

void Hub::SetDelay(std::chrono::microseconds delay) {
  std::lock_guard<std::mutex> lock(mutex_);
  delay_ = delay;
}

void Hub::SetJitter(std::chrono::microseconds jitter, uint64_t seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  jitter_ = jitter;
  random_.seed(seed);
}

void Hub::Silence(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank].silent = true;
}

void Hub::Kill(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  KillLocked(rank);
}

void Hub::KillAfterSends(int rank, int64_t messages) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank].sends_left = messages;
}

void Hub::KillLocked(int rank) {
  if (!std::exchange(ranks_[rank].alive, false)) return;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank || !ranks_[peer].alive) continue;
    // A silent rank dies silently: none of its messages arrive.
    if (!ranks_[rank].silent) {
      PutLocked(peer, {DueLocked(rank, peer), next_order_++, rank, true, {}, {}});
    }
    PutLocked(rank, {DueLocked(peer, rank), next_order_++, peer, true, {}, {}});
  }
}

void Hub::PutLocked(int to, Parcel parcel) {
  Rank& receiver = ranks_[to];
  if (receiver.inbox != nullptr) {
    receiver.inbox->Put(std::move(parcel));
  } else if (receiver.alive) {
    receiver.waiting.push_back(std::move(parcel));
  }
}

Clock::time_point Hub::DueLocked(int from, int to) {
  auto due = Clock::now() + delay_;
  if (jitter_.count() > 0) {
    due += std::chrono::microseconds(
        std::uniform_int_distribution<int64_t>(0, jitter_.count())(random_));
  }
  std::vector<Clock::time_point>& latest = ranks_[from].latest;
  latest.resize(size_);
  latest[to] = std::max(latest[to], due);
  return latest[to];
}

}  // namespace dad::local
