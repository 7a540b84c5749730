// A group of ranks with an NCCL communicator and a stream of its own.
//
// The communicator does not block: a call that NCCL has not finished is asked about until a
// deadline, so a peer that never comes costs that much time and no more. After an error, a
// deadline that has passed, or Break(), the communicator is aborted: kernels that wait for a peer
// end, and everything that was not known to be finished is an error.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "transport/device_collectives.h"
#include "transport/nccl/nccl_api.h"

namespace dad::nccl {

struct Libraries {
  CudaApi cuda;
  NcclApi nccl;
};

class Communicator {
 public:
  using Clock = std::chrono::steady_clock;
  using Millis = std::chrono::milliseconds;

  // An operation under way. Shared by the handle and by the communicator, which polls it.
  class Operation {
   public:
    Operation(std::shared_ptr<const Libraries> libraries, CudaEvent event, std::string what,
              Clock::time_point deadline)
        : libraries_(std::move(libraries)),
          event_(event),
          what_(std::move(what)),
          deadline_(deadline) {}
    ~Operation() { (void)libraries_->cuda.EventDestroy(event_); }
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;
    CudaEvent event() const { return event_; }

   private:
    friend class Communicator;
    const std::shared_ptr<const Libraries> libraries_;
    const CudaEvent event_;
    const std::string what_;
    const Clock::time_point deadline_;
    bool finished_ = false;  // guarded by the communicator's lock
  };

  // `members`: their ranks in the world; this one is members[rank].
  Communicator(std::shared_ptr<const Libraries> libraries, int device, std::vector<int> members,
               int rank);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  int device() const { return device_; }
  CudaStream stream() const { return stream_; }  // from Start to Close
  bool Has(int world_rank) const;

  // Meets the other members; once, before anything else. Break() from another thread ends it.
  Status Start(const UniqueId& id, Millis timeout);

  // Puts one operation on the stream: makes the stream wait for the views' events, calls `enqueue`
  // (between group calls if `grouped`), and records the event.
  using Enqueue = std::function<ResultCode(Comm, CudaStream)>;
  Result<std::shared_ptr<Operation>> Submit(std::string what, std::span<const TensorView> views,
                                            bool grouped, const Enqueue& enqueue, Millis timeout);

  // Whether it has finished. Never waits.
  Result<bool> Poll(Operation& operation);

  // Checks for errors and expired deadlines; true while something is under way.
  bool Watch();

  // Aborts. The first reason is kept.
  void Break(const Status& why);
  Status status() const;

  // Ends the communicator: work in flight gets `grace` to finish. Idempotent.
  void Close(Millis grace);

 private:
  // Asks NCCL until a call has completed. `lock` is released between questions.
  Status Settle(ResultCode code, const char* call, Clock::time_point deadline,
                std::unique_lock<std::mutex>& lock);
  Result<bool> PollLocked(Operation& operation);
  Status BreakLocked(const Status& why);  // returns the reason that is kept
  Status NcclError(ResultCode code, const char* call) const;

  const std::shared_ptr<const Libraries> libraries_;
  const int device_;
  const std::vector<int> members_;
  const int rank_;

  std::mutex submit_mutex_;   // one operation at a time goes onto the stream; taken before mutex_
  mutable std::mutex mutex_;  // every call on comm_
  Comm comm_ = nullptr;
  CudaStream stream_ = nullptr;
  Status broken_;
  bool closed_ = false;
  std::deque<std::shared_ptr<Operation>> under_way_;
};

}  // namespace dad::nccl
