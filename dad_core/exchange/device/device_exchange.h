// What exchanges that compute on a device have in common: the memory and the event of a step, the
// fallback to the host, and how a rank refuses to take part.
//
// A rank whose tensor comes by way of the host hands the step to the host's exchange, where there
// is one (`on_host`), with the same bytes on the wire. A rank that lacks device memory, or finds
// out otherwise that it cannot take part, refuses: its share says so, all ranks get the same error,
// and the engine keeps running (refusal.h).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "exchange/device/arena.h"
#include "exchange/device/bench.h"
#include "exchange/device/refusal.h"
#include "exchange/device/transfer.h"
#include "exchange/exchange.h"

namespace dad {

class DeviceExchange : public Exchange {
 public:
  ~DeviceExchange() override;

  Status Begin(const StepInput& input, const Group& group) final;
  int device() const final { return by_host_ || !Computes() ? -1 : bench_.device(); }
  DeviceEvent device_event() const final { return event_; }
  Status Send(int round, int peer, GatherBuffer& out) final;
  Status Receive(int round, std::span<const ByteSpan> shares) final;
  Status Finish() final;
  void Cancel() final;

 protected:
  DeviceExchange(const TensorSpec& spec, const ExchangeEnv& env,
                 std::unique_ptr<Exchange> on_host = nullptr)
      : spec_(spec), env_(env), bench_(*env.bench), on_host_(std::move(on_host)) {}

  // ---- What an exchange adds. A step that goes by way of the host calls none of these but
  // GoesByHost, LeaveToHost and AnyRefused.

  // Forgets the step before.
  virtual void Reset() = 0;
  // Puts this rank's part on the stream. kUnavailable: this rank refuses.
  virtual Status Compute() = 0;
  virtual Status SendShare(int round, int peer, GatherBuffer& out) = 0;
  // Not called once a rank is known to have refused, except where AnyRefused is overridden.
  virtual Status ReceiveShares(int round, std::span<const ByteSpan> shares) = 0;
  // Writes the result of a step in which nobody refused. The stream's event is recorded after it.
  virtual Status Deliver() = 0;
  // Gives back device memory that members hold, when the step is over or was given up.
  virtual void Drop() {}

  // Whether this step goes by way of the host.
  virtual bool GoesByHost(const Contribution* mine) const {
    return mine != nullptr && mine->input.device == DeviceType::kCpu;
  }
  // What the method keeps between steps becomes the host's.
  virtual void LeaveToHost() {}
  // Whether this rank's part is on the device; by default not where it has joined.
  virtual bool Computes() const { return step_.mine != nullptr; }

  // This rank refuses: notes it in refusal_, and in its share where that has room for a text.
  virtual void Refuse(const std::string& why) = 0;
  // Notes the refusals among the shares, of several the first rank's. True: there are some, and the
  // shares are not looked at.
  virtual Result<bool> AnyRefused(int round, std::span<const ByteSpan> shares);

  // ---- What it has to work with.

  // Refuses where a status is kUnavailable: the step goes on without this rank.
  Status OrRefuse(const Status& status);
  Status CheckOneLayer() const;
  Status Malformed(int rank, const std::string& what) const;  // "rank 3 sent" what
  // Records the event that comes after all that is on the stream.
  Status Record();
  // Copies bytes of the host to the device, by page-locked memory of the step.
  Status Bring(ByteSpan bytes, void* to);

  const TensorSpec spec_;
  const ExchangeEnv env_;
  DeviceBench& bench_;
  Group group_;
  // State of the current step.
  StepInput step_;
  DeviceEvent event_;
  DeviceArena arena_;
  PinnedKeep pinned_;  // until the event
  PinnedKeep sent_;    // until the next step: it may be on its way for that long
  Refusal refusal_;

 private:
  void Release();

  const std::unique_ptr<Exchange> on_host_;  // may be null
  bool by_host_ = false;
};

}  // namespace dad
