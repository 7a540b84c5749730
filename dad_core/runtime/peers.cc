#include "runtime/peers.h"

#include <algorithm>
#include <utility>

namespace dad {

Peers::Peers(int rank, int size, std::chrono::duration<double> timeout)
    : timeout_(timeout),
      interval_(
          std::clamp(static_cast<int64_t>(timeout.count() * 1000 / 5), int64_t{10}, int64_t{2000})),
      peers_(static_cast<size_t>(size)) {
  peers_[static_cast<size_t>(rank)].state = State::kGone;  // a rank does not wait for itself
}

void Peers::Heard(int peer, Clock::time_point now) {
  peers_[static_cast<size_t>(peer)].heard = now;
}

Peers::Verdict Peers::Check(const std::vector<bool>& awaited, std::span<const int64_t> progress,
                            Clock::time_point now) {
  Verdict verdict;
  const bool gap = now - checked_ > 3 * interval_;
  checked_ = now;
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (std::exchange(peer.progress, progress[i]) != progress[i]) peer.heard = now;
    if (peer.state != State::kAlive || !awaited[i]) {
      peer.awaited = false;
      continue;
    }
    if (!peer.awaited || gap) {
      peer.awaited = true;
      peer.heard = std::max(peer.heard, now);
      continue;
    }
    if (now - peer.heard >= timeout_) {
      verdict.silent = static_cast<int>(i);
    } else if (now - peer.heard >= interval_ && now - peer.pinged >= interval_) {
      peer.pinged = now;
      verdict.ping.push_back(static_cast<int>(i));
    }
  }
  return verdict;
}

}  // namespace dad
