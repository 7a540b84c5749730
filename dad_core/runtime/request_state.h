// A request in the engine: its parameters, its progress, and its ticket.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dad/request.h"
#include "dad/ticket.h"
#include "exchange/exchange.h"
#include "runtime/inbox.h"
#include "wire/negotiation.h"

namespace dad {

// Counts phases: a new one starts with the first request after a user has waited.
// Requests of one phase are in flight together.
class PhaseCounter {
 public:
  uint32_t NextSubmit() {
    if (waited_.exchange(false, std::memory_order_relaxed)) {
      phase_.fetch_add(1, std::memory_order_relaxed);
    }
    return phase_.load(std::memory_order_relaxed);
  }
  void UserWaits() { waited_.store(true, std::memory_order_relaxed); }

 private:
  std::atomic<uint32_t> phase_{0};
  std::atomic<bool> waited_{false};
};

struct StagedTensors;

class RequestState final : public Ticket, public std::enable_shared_from_this<RequestState> {
 public:
  using Clock = std::chrono::steady_clock;

  // `inbox` and `phases` are null for a request that never reaches the worker.
  RequestState(Request r, std::shared_ptr<Inbox> inbox, std::shared_ptr<PhaseCounter> phases,
               Clock::time_point now = Clock::now());

  bool Done() override;
  bool finished() const { return done_.load(std::memory_order_acquire); }
  Status Wait(std::chrono::milliseconds timeout) override;
  void UserWaits() override;
  bool Rejected() const override { return rejected; }
  void OnDone(std::function<void(const Status&)> done) override;
  const std::vector<int64_t>& received_splits() const override { return splits; }
  int64_t value() const override { return result_value; }
  DeviceEvent done_event() const override { return done; }

  // Call before it is posted. Sets OnDone, and whether a user blocks on it.
  void Watch(bool user_waits, std::function<void(const Status&)> done);

  // By the worker only, once.
  void Complete(const Status& status);

  Request request;
  const RequestMeta meta;
  const RequestKey key;
  uint32_t phase = 0;
  bool rejected = false;  // set before anybody else has the ticket
  const uint64_t submit_id;
  const Clock::time_point submitted;

  // Worker only.
  int parts_left = 0;  // slices still in flight
  Status first_error;  // of a part
  int leaving = 0;     // parts that were withdrawn, but whose bytes are still in flight
  bool ended = false;  // it is done as soon as they have left
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
  int64_t device_bytes = 0;  // given to the device collectives
  StepReport report;
  bool warned = false;        // the stall watch has warned about it
  bool asked_about = false;   // the stall watch has asked the missing ranks what they are doing
  std::string doing;          // what they answered
  bool waited_for = false;    // a user thread blocks on it
  bool polled = false;        // no user blocks on it, but one polls it or wants to be called
  Clock::time_point started;  // of the first batch that carries it
  int64_t step = 0;           // the step of this tensor, as counted by the statistics
  bool negotiated = false;    // else its batch went by the schedule
  int last_rank = -1;         // the last rank to have it ready, for which all others waited
  Clock::time_point ready;    // when we learned that it was

  std::vector<int64_t> splits;
  int64_t result_value = -1;
  std::vector<int> absent;  // ranks that had joined and contributed nothing

  // Of device tensors.
  const int device_index;                 // -1: on the host
  std::shared_ptr<StagedTensors> staged;  // its tensors in host memory
  DeviceEvent done;                       // its results come before this event

 private:
  const std::shared_ptr<Inbox> inbox_;
  const std::shared_ptr<PhaseCounter> phases_;
  void TellPolled();

  std::atomic<bool> done_{false};
  std::atomic<bool> told_polled_{false};
  std::mutex mutex_;
  std::condition_variable finished_;
  Status status_;                                // guarded by mutex_
  std::function<void(const Status&)> callback_;  // guarded by mutex_
};

}  // namespace dad
