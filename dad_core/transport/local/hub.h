// The shared part of a LocalNetwork: which ranks are alive, and when a message arrives.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

#include "util/aligned_buffer.h"
#include "wire/message.h"

namespace dad::local {

using Clock = std::chrono::steady_clock;

struct Parcel {
  Clock::time_point due;
  uint64_t order;  // of two that are due at the same time, the first sent is delivered first
  int from;
  bool lost = false;  // not a message, but the end of `from`
  MessageHeader header;
  AlignedBuffer payload;
};

// Where parcels for a rank are delivered.
class Inbox {
 public:
  virtual ~Inbox() = default;
  virtual void Put(Parcel parcel) = 0;
};

class Hub {
 public:
  explicit Hub(int size) : size_(size), ranks_(size) {}

  int size() const { return size_; }

  // Delivers at once what arrived for the rank before it attached.
  void Attach(int rank, Inbox* inbox);
  // The rank ends: its peers are notified, and `inbox` is not used any more.
  void Detach(int rank);

  // Returns false if the message was dropped because the sender is dead.
  bool Send(int from, int to, const MessageHeader& header, AlignedBuffer payload);

  void SetDelay(std::chrono::microseconds delay);
  void SetLineRate(double bytes_per_second) { line_rate_ = bytes_per_second; }
  double line_rate() const { return line_rate_; }
  void SetJitter(std::chrono::microseconds jitter, uint64_t seed);
  void Silence(int rank);
  void Kill(int rank);
  void KillAfterSends(int rank, int64_t messages);

 private:
  struct Rank {
    Inbox* inbox = nullptr;
    std::vector<Parcel> waiting;            // before Attach
    std::vector<Clock::time_point> latest;  // due time of the last parcel to each peer
    bool alive = true;
    bool silent = false;
    int64_t sends_left = -1;  // negative: no limit
  };

  void KillLocked(int rank);
  void PutLocked(int to, Parcel parcel);
  Clock::time_point DueLocked(int from, int to);

  const int size_;
  std::atomic<double> line_rate_{0};
  std::mutex mutex_;
  std::vector<Rank> ranks_;
  std::chrono::microseconds delay_{0};
  std::chrono::microseconds jitter_{0};
  std::mt19937_64 random_;
  uint64_t next_order_ = 0;
};

}  // namespace dad::local
