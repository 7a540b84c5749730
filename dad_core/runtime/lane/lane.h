// One process set: its members agree on what to do next, and do it. A state machine without threads
// or locks: the engine's worker feeds it events and calls Pump when it has no more. ARCHITECTURE.md
// describes the protocol.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dad/engine.h"
#include "dad/options.h"
#include "dad/snapshot.h"
#include "runtime/execute/executor.h"
#include "runtime/lane/negotiator.h"
#include "runtime/lane/schedule.h"
#include "runtime/lane/tensor_cache.h"
#include "runtime/lane/wire_out.h"
#include "runtime/observe/tuner.h"
#include "runtime/request_state.h"

namespace dad {

// Events in a lane that concern the whole engine.
class LaneOwner {
 public:
  virtual ~LaneOwner() = default;
  virtual void Completed(const std::shared_ptr<RequestState>& request) = 0;
  // All ranks agreed on a new process set, or on the end of one.
  virtual void ProcessSetDecided(const RequestMeta& meta,
                                 const std::shared_ptr<RequestState>& mine) = 0;
  virtual void AllJoined(int last_rank) = 0;
  virtual uint32_t num_joins() const = 0;  // the number that all ranks have reached
  // Whether this rank has requests open in lanes other than that of all ranks.
  virtual bool HasOpenInSets() const = 0;
};

// The size from which a tensor goes around a ring of this many members, given `bytes_per_rank` for
// each of them (Options::ring_bytes); 0: no tensor does.
int64_t RingBytes(int64_t bytes_per_rank, size_t num_members);

class Lane {
 public:
  using Clock = std::chrono::steady_clock;

  Lane(int id, std::vector<int> ranks, int my_rank, const Options& options, const ExchangeEnv& env,
       WireOut* wire, LaneOwner* owner);

  int id() const { return id_; }
  const std::vector<int>& ranks() const { return ranks_; }
  int MemberOf(int rank) const;  // -1: not a member

  void Submit(std::shared_ptr<RequestState> request);
  void OnMessage(int member, const MessageHeader& header, AlignedBuffer payload);
  void OnSent(uint64_t batch) { executor_.OnSent(batch); }
  void OnDevice(const DeviceOutcome& outcome) { executor_.OnDevice(outcome); }
  // Whether a request is exchanged from device to device.
  bool TakesOnDevice(const RequestMeta& meta) const { return GoesOnDevice(meta, env_); }
  // Whether its method is computed on the device, from this rank's tensors as they are.
  bool ComputesOnDevice(const RequestState& request) const;
  // Whether the other ranks compute it on their devices, and so must this one.
  bool MustComputeOnDevice(const RequestState& request) const;
  void SetJoined(bool joined);
  // Ends requests of this step that have not begun, and later ones, with `why`.
  void GiveUp(uint64_t step, const Status& why);

  // Sends pending messages and acts on those received.
  void Pump();

  // When to call Pump again even if nothing happens.
  std::optional<Clock::time_point> NextDeadline() const;

  // `member` has shut down: requests that need anything further from it fail, in the next Pump and
  // from then on.
  void MemberGone(int member, const Status& why);
  // All members have agreed to remove the set. It is gone when its executor is not busy.
  void Remove(const Status& why);
  // Call when the transport is closed.
  void FailAll(const Status& why);

  const Status& closed() const { return closed_; }
  bool has_open() const { return !in_flight_.empty(); }
  // Whether Pump has to announce that nothing delays the end of this rank's join any more.
  bool HasSettled() const { return closed_.ok() && !spoken_ && pending_said_ && !IsPending(); }
  bool busy() const { return !in_flight_.empty() || (closed_.ok() && (joined_ || spoken_)); }
  // Messages that have arrived and were not used yet; there are none once all members are idle.
  size_t num_unread() const { return executor_.num_unread() + heard_.size(); }

  // Members that something here waits for.
  std::vector<bool> Awaited() const;
  // Requests submitted before `since`, with the global ranks that keep them waiting.
  struct Stalled {
    std::shared_ptr<RequestState> request;
    std::vector<int> ranks;
    // Whether all ranks have submitted it and it only waits for a later message.
    bool is_ready = false;
  };
  std::vector<Stalled> StalledSince(Clock::time_point since) const;

  // Adds this lane's open requests.
  void Describe(Snapshot& snapshot) const;
  // What other members have announced or sent and this one has not submitted.
  std::vector<Wanted> WantedHere() const;

  const Executor& executor() const { return executor_; }
  Executor& executor() { return executor_; }
  int64_t num_negotiations() const { return static_cast<int64_t>(sequence_); }
  int64_t num_predicted() const { return num_predicted_; }
  // When the last negotiation ended; the epoch: there was none.
  Clock::time_point last_cycle() const { return last_cycle_; }

 private:
  size_t num_members() const { return ranks_.size(); }
  Group WholeGroup() const { return {member_, static_cast<int>(num_members()), {}}; }

  // By value, as in Done, because the argument may be the entry that is erased.
  void Route(std::shared_ptr<RequestState> request);
  Clock::time_point GatherUntil() const;
  void Speak();
  bool HasHeard(int member) const;  // of the open negotiation
  NegotiationMessage Compose();
  void Conclude(std::vector<NegotiationMessage> messages);
  void FitToLine(bool slow);
  void Start(const Decision& decision, bool scheduled);
  bool JoinedAnew() const;
  bool IsPending() const { return id_ == 0 && joined_ && owner_->HasOpenInSets(); }
  std::vector<int> AbsentRanks(const Decision::Ready& ready) const;
  void NoteLast(const Decision::Ready& ready, RequestState& request) const;
  void Fail(const RequestKey& key, const Status& why);
  void NoteGivenUp(uint64_t step, const Status& why);
  void TakeBack();
  const Status* WhyGivenUp(const RequestState& request) const;
  void Done(std::shared_ptr<RequestState> request);
  void Close(const Status& why);
  void Land(const RequestKey& key);

  // lane_schedule.cc
  void Note(const Decision& decision);
  bool IsTimeToSchedule(const std::vector<NegotiationMessage>& messages,
                        const Decision& decision) const;
  bool IsScheduled(const RequestKey& key) const;
  void BuildSchedule();
  bool IsOutgrown() const;
  void ForgetTimes();
  bool TrySchedule(const std::shared_ptr<RequestState>& request);
  void Prepare(const ScheduledBatch& batch, uint32_t cache_id, RequestState& request);
  void Commit(uint32_t index);
  void Retune(int64_t fusion_bytes);
  std::vector<uint32_t> MissingOf(const ScheduledBatch& batch) const;
  static std::optional<Clock::time_point> PatienceEnds(const ScheduledBatch& batch);
  void LosePatience();
  void RecallOtherKinds(const RequestKey& key);
  void AskRecall(const std::vector<uint32_t>& missing, const std::vector<uint32_t>& stale);
  void TraceRecall(const std::vector<NegotiationMessage>& messages) const;
  void FinishRecall(const std::vector<NegotiationMessage>& messages);

  const int id_;
  const std::vector<int> ranks_;
  const int member_;
  const Options options_;
  ExchangeEnv env_;
  WireOut* const wire_;
  LaneOwner* const owner_;

  std::unordered_map<RequestKey, std::shared_ptr<RequestState>, HashOfKey> in_flight_;
  bool under_way_ = false;  // whether anything has started since nothing was in flight
  std::vector<std::shared_ptr<RequestState>> unannounced_;
  Clock::time_point oldest_unannounced_;

  uint64_t sequence_ = 0;  // the negotiation that is open
  Clock::time_point last_cycle_;
  bool spoken_ = false;  // whether our message with that number was sent
  struct Heard {
    NegotiationMessage message;
    Clock::time_point at;
  };
  std::map<uint64_t, std::vector<std::optional<Heard>>> heard_;
  std::vector<Clock::time_point> heard_at_;  // per member, for the last finished negotiation

  TensorCache cache_;
  Negotiator negotiator_;
  Executor executor_;

  std::optional<Schedule> schedule_;
  uint32_t next_schedule_ = 0;
  int most_times_ = 0;  // the most times that a tensor was negotiated since there was a schedule
  enum class Recall { kNo, kWanted, kCounting } recall_ = Recall::kNo;
  std::vector<uint32_t> missing_;  // announced with the recall
  std::vector<uint32_t> stale_;
  std::vector<uint32_t> all_missing_;  // announced by any rank
  std::vector<uint32_t> all_stale_;    // the same: they leave the cache after the recall
  std::unordered_map<RequestKey, int, HashOfKey> num_changes_;  // of shape
  int64_t fusion_bytes_;
  int64_t wanted_fusion_bytes_;
  int64_t num_predicted_ = 0;
  std::unique_ptr<Tuner> tuner_;  // on the first member of the global set, if asked for

  std::vector<RequestKey> withdrawn_;                 // to be announced
  std::deque<std::pair<uint64_t, Status>> given_up_;  // steps, and the reasons
  bool must_take_back_ = false;                       // what is left of them

  bool joined_ = false;
  bool joined_said_ = false;
  bool pending_said_ = false;
  uint32_t joins_said_ = 0;     // the number of joins that were over then
  std::map<int, Status> gone_;  // members that have shut down
  Status closed_;               // not OK: the lane takes nothing more
};

}  // namespace dad
