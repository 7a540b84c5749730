// A Chrome trace of what happens to each tensor; chrome://tracing or Perfetto opens it. One file
// per rank, valid JSON at any time. Events are in the file soon after they happen, even if no other
// event follows, so a rank that is killed leaves all but its last moments. A tensor's track has
// Horovod's name for it ("allreduce.x"), and dad's ("x") in the argument "tensor". start and stop
// are thread-safe; the rest is for the worker.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dad/status.h"
#include "util/mutex.h"

namespace dad {

class RequestState;
struct BatchPart;

class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Timeline(int rank) : rank_(rank) {}
  ~Timeline() { (void)Stop(); }

  // How far rank 0's clock is ahead of ours, for joining the files of many ranks.
  void SetOffset(int64_t offset_us) { offset_us_ = offset_us; }

  Status Start(const std::string& path, bool mark_cycles);
  Status Stop();

  // NEGOTIATE_ALLREDUCE: from the submit until its data starts to move. WAIT_FOR_BATCH where it
  // went by the schedule: until the other tensors of its batch were there.
  void Started(const RequestState& request);
  // ROUND_<n> of all tensors of a batch: when the message of each rank arrived, and whose was last.
  struct BatchRound {
    uint64_t batch;
    int round;
    Clock::time_point started;
    Clock::time_point ended;
    int last_rank;
    std::vector<std::pair<int, Clock::time_point>> arrived;  // by rank
  };
  void Round(const std::vector<BatchPart>& parts, const BatchRound& round);
  // RECALL, an instant on the trace of the whole rank: who requested it, and for which tensors.
  struct Recall {
    uint32_t schedule = 0;
    std::vector<int> ranks;
    std::vector<std::string> missing;
    std::vector<std::string> changed;
  };
  void Recalled(const Recall& recall, Clock::time_point at);
  // ALLREDUCE: from the first byte to the result.
  void Finished(const RequestState& request);
  // An instant on the trace of the whole rank.
  void Cycle();

  // When to call FlushIfDue next; none: everything is in the file.
  std::optional<Clock::time_point> NextFlush();
  void FlushIfDue(Clock::time_point now);

 private:
  void Write(const RequestState& request, const std::string& what, Clock::time_point from,
             Clock::time_point to, const std::string& args) REQUIRES(mutex_);
  int64_t Micros(Clock::time_point at) const REQUIRES(mutex_);
  int TrackOf(const RequestState& request) REQUIRES(mutex_);
  void Append(const std::string& event) REQUIRES(mutex_);
  void Flush() REQUIRES(mutex_);

  const int rank_;
  int64_t offset_us_ = 0;
  std::atomic<bool> on_{false};
  Mutex mutex_;
  int file_ GUARDED_BY(mutex_) = -1;
  int64_t end_ GUARDED_BY(mutex_) = 0;      // where the closing bracket is
  std::string pending_ GUARDED_BY(mutex_);  // whole events that are not in the file yet
  Clock::time_point pending_since_ GUARDED_BY(mutex_);
  bool failed_ GUARDED_BY(mutex_) = false;
  bool mark_cycles_ GUARDED_BY(mutex_) = false;
  Clock::time_point zero_ GUARDED_BY(mutex_);
  std::unordered_map<std::string, int> tracks_ GUARDED_BY(mutex_);  // by Horovod's names
};

}  // namespace dad
