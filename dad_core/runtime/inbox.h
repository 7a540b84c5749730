// The only queue of the worker: everything it has to handle is posted here as an event. Framework
// threads and transport threads post; the worker takes all events at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "dad/status.h"
#include "util/aligned_buffer.h"
#include "util/mutex.h"
#include "wire/message.h"

namespace dad {

class RequestState;

struct SubmitEvent {
  std::shared_ptr<RequestState> request;
};
struct SubmitAllEvent {
  std::vector<std::shared_ptr<RequestState>> requests;
};
// A user thread blocks on this request, so nothing more comes from it meanwhile; or it only polls
// it (`polls`), which says less.
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
// The referenced bytes of a batch have been sent.
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
      MutexLock lock(mutex_);
      events_.push_back(std::move(event));
      wake = sleeping_;
    }
    if (wake) posted_.NotifyOne();
  }

  // Waits for events, or until the deadline; swaps them into `events` (cleared first).
  void Take(std::optional<Clock::time_point> deadline, std::vector<Event>& events) {
    events.clear();
    MutexLock lock(mutex_);
    sleeping_ = true;
    while (events_.empty()) {
      if (!deadline.has_value()) {
        posted_.Wait(lock);
      } else if (Clock::now() < *deadline) {
        posted_.WaitUntil(lock, *deadline);
      } else {
        break;
      }
    }
    sleeping_ = false;
    events.swap(events_);
  }

 private:
  Mutex mutex_;
  Condition posted_;
  std::vector<Event> events_ GUARDED_BY(mutex_);
  bool sleeping_ GUARDED_BY(mutex_) = false;
};

}  // namespace dad
