// The handle of a submitted request, and the only way by which the worker returns results.
// Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "dad/device.h"
#include "dad/export.h"
#include "dad/status.h"

namespace dad {

class DAD_EXPORT Ticket {
 public:
  virtual ~Ticket() = default;

  virtual bool Done() = 0;

  // Blocks until done or until `timeout` has passed (kTimeout; the request goes
  // on). A negative timeout waits for ever: the engine bounds it, since a dead or
  // silent peer fails every ticket.
  virtual Status Wait(std::chrono::milliseconds timeout = std::chrono::milliseconds(-1)) = 0;

  // Tells the engine, without blocking, that a user blocks on it. Nothing else will be submitted
  // before it is done, so the engine must not hold it back to fuse it with other requests.
  virtual void UserWaits() = 0;

  // Whether this rank rejected the request when it was submitted, so that no other rank has heard
  // of it.
  virtual bool Rejected() const = 0;

  // Calls `done` once with the final status: on the worker thread, or at once
  // when the ticket is done already. At most one callback per ticket.
  virtual void OnDone(std::function<void(const Status&)> done) = 0;

  // Valid after a successful Wait.
  virtual const std::vector<int64_t>& received_splits() const = 0;  // alltoall
  // join: the last rank; add process set: its id; methods other than "none": the flags below,
  // the same on every rank.
  virtual int64_t value() const = 0;

  // Device tensors: a ticket is done when the work has been enqueued on the device, and streams
  // that use the tensors afterwards have to wait for this event. Null for tensors on the host.
  virtual DeviceEvent done_event() const = 0;
};

inline constexpr int64_t kWantsPlan = 1;  // some rank asks for a new plan
// Some rank's contribution was not finite; the result is NaN. value() >> kRankShift is 1 + the
// first such rank within the process set, or 0 where the method does not tell.
inline constexpr int64_t kNotFinite = 2;
inline constexpr int64_t kTooLarge = 4;  // some rank's share would have been larger than dense's
inline constexpr int kRankShift = 8;

}  // namespace dad
