// The lane's connection to the outside: a way to its members, a clock, and the timeline. The engine
// implements it; tests use a fake (tests/cpp/unit/lane_fixture.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "runtime/inbox.h"
#include "util/gather_buffer.h"
#include "wire/message.h"

namespace dad {

class Timeline;
struct DeviceTask;

// Held by every message that references memory of a batch.
class SendPin {
 public:
  SendPin(std::shared_ptr<Inbox> inbox, uint16_t lane, uint64_t batch)
      : inbox_(std::move(inbox)), lane_(lane), batch_(batch) {}
  ~SendPin() {
    if (tell_.load(std::memory_order_acquire)) inbox_->Post(SentEvent{lane_, batch_});
  }
  SendPin(const SendPin&) = delete;
  SendPin& operator=(const SendPin&) = delete;

  void TellWhenReleased() { tell_.store(true, std::memory_order_release); }

 private:
  const std::shared_ptr<Inbox> inbox_;
  const uint16_t lane_;
  const uint64_t batch_;
  std::atomic<bool> tell_{false};
};

class WireOut {
 public:
  virtual ~WireOut() = default;
  // `member` counts within the lane.
  virtual void Send(int member, MessageHeader header, GatherBuffer payload,
                    std::shared_ptr<void> keep) = 0;
  // Lets the transport write a message straight to `memory`.
  virtual void OfferMemory(int member, uint64_t batch, int round, std::span<std::byte> memory) = 0;
  // Withdraws an offer. False: its message is being written, and will arrive.
  virtual bool TakeBackMemory(int member, uint64_t batch, int round) = 0;
  virtual std::shared_ptr<SendPin> MakePin(uint64_t batch) = 0;
  // The ranks agree on a batch that devices exchange; OnDevice reports the outcome.
  virtual void RunOnDevice(DeviceTask task) = 0;
  // The ranks are out of step, or a peer sent an invalid message: the engine ends.
  virtual void Fatal(int member, const std::string& why) = 0;
  virtual Timeline* timeline() = 0;
  // The time on which all decisions of the lane and all times that it reports are based.
  virtual std::chrono::steady_clock::time_point Now() const = 0;
  // Bytes per second; 0: not known.
  virtual double LineRate() const = 0;
};

}  // namespace dad
