// Runs the rounds of batches: asks each exchange for its bytes, sends one fused
// message per peer, and hands back what arrives. Any number of batches is in flight, and
// they do not wait for each other. Worker only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "dad/engine.h"
#include "dad/snapshot.h"
#include "exchange/exchange.h"
#include "runtime/device/device_lane.h"
#include "runtime/lane/wire_out.h"
#include "runtime/observe/lag_log.h"
#include "runtime/request_state.h"
#include "wire/message.h"

namespace dad {

// One tensor (or a slice of it) in a batch.
struct BatchPart {
  std::shared_ptr<Exchange> exchange;
  std::shared_ptr<RequestState> request;  // null: this rank has joined
  int tensor = 0;
};

// The input of an exchange, from a request; valid as long as the request.
StepInput InputOf(RequestState& request, int tensor);

struct TensorTraffic {
  int64_t steps = 0;
  int64_t sent = 0;
  int64_t received = 0;
  int64_t device = 0;
  int64_t dense = 0;
  double effective = -1.0;  // of the last step
  double captured = -1.0;
  double seconds = 0.0;
  // The part of these counters since the name last changed its kind or method: a weight is
  // broadcast, and warms up densely, under the same name as its gradient.
  OpKind kind = OpKind::kAllReduce;
  Method method;
  RecentTraffic recent;
  WorstStep worst;
};

class Executor {
 public:
  // `done` is called when the last part of a request has ended. `ranks` are those of the members.
  Executor(int member, std::vector<int> ranks, WireOut* wire,
           std::function<void(const std::shared_ptr<RequestState>&)> done);
  ~Executor();

  // Begins a batch and sends its first round. `signature` identifies what all ranks believe the
  // batch to be.
  void Start(uint64_t id, uint64_t signature, std::vector<BatchPart> parts, const Group& group);

  void OnData(int member, const MessageHeader& header, AlignedBuffer payload);
  // `member` has left a batch and will send nothing more of it.
  void OnLeft(int member, const MessageHeader& header, AlignedBuffer payload);
  void OnSent(uint64_t id);
  // Batches whose next bytes a device is still producing. SendHeld() polls them; no thread waits.
  bool holds() const { return !held_.empty(); }
  void SendHeld();
  // A batch that devices exchange is on the device, or has failed.
  void OnDevice(const DeviceOutcome& outcome);

  // Withdraws a batch of which no round was received, and returns its requests. They must not end
  // while `leaving`; `done` is called for those that have `ended` in the meantime.
  std::vector<std::shared_ptr<RequestState>> Cancel(uint64_t id);
  // True while some batch in flight has a part of the request.
  bool Carries(const std::shared_ptr<RequestState>& request) const;
  // The schedule has been recalled: batches of it and of earlier schedules that have not started
  // here never will. Drops their messages, also those that arrive later, since a recall may
  // overtake them.
  void RetireSchedule(uint32_t schedule);

  // `member` will send nothing more: batches that need it fail. Members that wait for our part of
  // such a batch, and cannot know otherwise, get a kLeft message.
  void MemberGone(int member, const Status& why);
  // No more batches start here: members that send data of one get a kLeft message.
  void StartNoMore(const Status& why);
  // All members abandon the batches that they have begun; some messages may still be in flight.
  void LeaveAll(const Status& why);
  bool busy() const { return !running_.empty(); }
  // Messages of batches that have not started here.
  size_t num_unread() const;
  // The members that have sent such messages of a batch.
  std::set<int> EarlyMembers(uint64_t id) const;
  // Call after the transport is closed and no longer touches memory of requests.
  void FailAll(const Status& why);

  // Members that some batch waits for.
  std::vector<bool> Awaited() const;
  // Requests whose batch has waited for some member since a time before `since`.
  struct Late {
    std::shared_ptr<RequestState> request;
    std::vector<int> members;
    int round;
  };
  std::vector<Late> LateSince(std::chrono::steady_clock::time_point since) const;

  // Adds the batches that are not done.
  void Describe(Snapshot& snapshot) const;

  const std::map<TensorKey, TensorTraffic>& traffic() const { return traffic_; }
  SlowestRank slowest() const { return lags_.Slowest(); }
  void ResetTraffic() {
    traffic_.clear();
    lags_ = {};
  }

 private:
  struct Share {
    bool arrived = false;
    bool in_place = false;  // written where the exchange said
    AlignedBuffer payload;
    size_t num_bytes = 0;
    std::chrono::steady_clock::time_point at;  // when it came
  };
  struct Batch;
  struct Early {
    int member;
    MessageHeader header;
    AlignedBuffer payload;
    std::chrono::steady_clock::time_point at;
  };

  bool SendOrHold(Batch& batch);
  Result<bool> ReadyToSend(Batch& batch);
  Status SendRound(Batch& batch);
  void OfferDestinations(Batch& batch);
  void ExpectNothingFromSilent(Batch& batch);
  bool Accept(Batch& batch, int member, const MessageHeader& header, AlignedBuffer payload,
              std::chrono::steady_clock::time_point at);
  void NoteRound(const Batch& batch);
  void NoteLag(const RequestState& request, std::chrono::steady_clock::duration lag);
  void Advance(Batch& batch);
  Status ReceiveRound(Batch& batch);
  Status SplitShare(Batch& batch, int member, std::vector<std::vector<ByteSpan>>& shares);
  void Finish(Batch& batch);
  void Leave(Batch& batch);
  void LeaveAndTell(Batch& batch, const Status& why, const std::function<bool(int member)>& knows);
  void TellLeft(int member, uint64_t id, uint64_t signature, const Status& why);
  void ReleaseWhenUnused(Batch& batch);
  void Release(Batch& batch);
  void EndPart(BatchPart& part, const Status& status);

  const int member_;
  const std::vector<int> ranks_;
  const int num_members_;
  WireOut* const wire_;
  const std::function<void(const std::shared_ptr<RequestState>&)> done_;
  std::unordered_map<uint64_t, std::unique_ptr<Batch>> running_;
  std::unordered_map<uint64_t, std::vector<Early>> early_;
  bool IsRetired(uint64_t id) const;

  std::optional<uint32_t> retired_schedule_;
  std::unordered_set<uint64_t> left_;  // batches; messages of them may still come
  Status start_no_more_;               // not OK: why
  std::vector<uint64_t> held_;
  std::map<TensorKey, TensorTraffic> traffic_;
  LagLog lags_;
};

}  // namespace dad
