// What this rank knows about the life of the others. Worker only.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace dad {

class Peers {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State { kAlive, kGone, kLost };  // gone: said goodbye

  Peers(int rank, int size, std::chrono::duration<double> timeout);

  void Heard(int peer, Clock::time_point now);
  void Set(int peer, State state) { peers_[static_cast<size_t>(peer)].state = state; }
  State Get(int peer) const { return peers_[static_cast<size_t>(peer)].state; }
  bool Alive(int peer) const { return Get(peer) == State::kAlive; }

  // Which of the awaited peers to ping now, and which have been silent for too long. The clock of a
  // peer starts when somebody begins to wait for it; a gap between checks (nobody waited, or this
  // process was stopped) restarts it. `progress` holds Transport::ProgressWith of each rank: a peer
  // whose number has changed since the last check is alive, however slow its line is.
  struct Verdict {
    std::vector<int> ping;
    std::optional<int> silent;
  };
  Verdict Check(const std::vector<bool>& awaited, std::span<const int64_t> progress,
                Clock::time_point now);

  // How often to call Check while anybody is waited for.
  std::chrono::milliseconds interval() const { return interval_; }
  std::chrono::duration<double> timeout() const { return timeout_; }

 private:
  struct Peer {
    State state = State::kAlive;
    bool awaited = false;
    Clock::time_point heard;  // or when it began to be awaited
    Clock::time_point pinged;
    int64_t progress = 0;
  };
  const std::chrono::duration<double> timeout_;
  const std::chrono::milliseconds interval_;
  Clock::time_point checked_;
  std::vector<Peer> peers_;
};

}  // namespace dad
