// The one queue of the worker: whoever has something for it posts an event here.
// Framework threads and transport threads post, the worker takes all at once.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include "dad/status.h"
#include "util/aligned_buffer.h"
#include "wire/message.h"

namespace dad {

class RequestState;

struct SubmitEvent {
  std::shared_ptr<RequestState> request;
};
struct SubmitAllEvent {
  std::vector<std::shared_ptr<RequestState>> requests;
};
// A user thread blocks on this request: nothing more will come from it meanwhile.
// Or it looks at it now and then (`polls`), which says less.
struct WaitingEvent {
  std::shared_ptr<RequestState> request;
  bool polls = false;
};
struct MessageEvent {
  int peer;
  MessageHeader header;
  AlignedBuffer payload;
};
struct PeerLostEvent {
  int peer;
  Status why;
};
// The referenced bytes of a batch have left.
struct SentEvent {
  uint16_t lane;
  uint64_t batch;
};
struct CallEvent {
  std::function<void()> call;
};
struct ShutdownEvent {};

using Event = std::variant<SubmitEvent, SubmitAllEvent, WaitingEvent, MessageEvent, PeerLostEvent,
                           SentEvent, CallEvent, ShutdownEvent>;

class Inbox {
 public:
  using Clock = std::chrono::steady_clock;

  void Post(Event event) {
    bool wake;
    {
      std::lock_guard lock(mutex_);
      events_.push_back(std::move(event));
      wake = sleeping_;
    }
    if (wake) posted_.notify_one();
  }

  // Waits for events, or until the deadline; swaps them into `events` (cleared first).
  void Take(std::optional<Clock::time_point> deadline, std::vector<Event>& events) {
    events.clear();
    std::unique_lock lock(mutex_);
    sleeping_ = true;
    auto ready = [this] { return !events_.empty(); };
    if (deadline.has_value()) {
      posted_.wait_until(lock, *deadline, ready);
    } else {
      posted_.wait(lock, ready);
    }
    sleeping_ = false;
    events.swap(events_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable posted_;
  std::vector<Event> events_;  // guarded by mutex_
  bool sleeping_ = false;      // guarded by mutex_
};

}  // namespace dad
