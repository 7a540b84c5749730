// One process set: its members agree on what to do next, and do it. A state
// machine without thread or lock: the engine's worker feeds it events and calls
// Pump when it has no more. ARCHITECTURE.md tells the protocol.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "dad/options.h"
#include "runtime/executor.h"
#include "runtime/negotiator.h"
#include "runtime/request_state.h"
#include "runtime/schedule.h"
#include "runtime/tensor_cache.h"
#include "runtime/tuner.h"
#include "runtime/wire_out.h"

namespace dad {

// What happened in a lane that concerns the whole engine.
class LaneOwner {
 public:
  virtual ~LaneOwner() = default;
  virtual void Completed(const std::shared_ptr<RequestState>& request) = 0;
  // All ranks agreed on a new process set, or on the end of one.
  virtual void ProcessSetDecided(const RequestMeta& meta,
                                 const std::shared_ptr<RequestState>& mine) = 0;
  virtual void AllJoined(int last_rank) = 0;
};

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
  void SetJoined(bool joined);

  // Sends what has to be said and acts on what was heard.
  void Pump();

  // When Pump wants to be called again though nothing has happened.
  std::optional<Clock::time_point> NextDeadline() const;

  // `member` has shut down: what needs it fails, now and from now on.
  void MemberGone(int member, const Status& why);
  void FailAll(const Status& why);

  const Status& closed() const { return closed_; }
  bool busy() const { return !in_flight_.empty() || joined_ || spoken_; }

  // Members that something here waits for.
  std::vector<bool> Awaited() const;
  // Requests submitted before `since`, with the global ranks that keep them waiting.
  struct Stalled {
    std::shared_ptr<RequestState> request;
    std::vector<int> ranks;
  };
  std::vector<Stalled> StalledSince(Clock::time_point since) const;

  const Executor& executor() const { return executor_; }
  Executor& executor() { return executor_; }
  int64_t num_negotiations() const { return static_cast<int64_t>(sequence_); }
  int64_t num_predicted() const { return num_predicted_; }

 private:
  size_t num_members() const { return ranks_.size(); }
  Group WholeGroup() const { return {member_, static_cast<int>(num_members()), {}}; }

  void Route(const std::shared_ptr<RequestState>& request);
  bool TrySchedule(const std::shared_ptr<RequestState>& request);
  void Prepare(const ScheduledBatch& batch, uint32_t cache_id, RequestState& request);
  void Commit(uint32_t index);
  void AskRecall(const std::vector<uint32_t>& missing, const std::vector<uint32_t>& stale);
  std::vector<uint32_t> MissingOf(const ScheduledBatch& batch) const;
  static std::optional<Clock::time_point> PatienceEnds(const ScheduledBatch& batch);
  void LosePatience();
  void Retune(int64_t fusion_bytes);
  Clock::time_point GatherUntil() const;
  void Speak();
  NegotiationMessage Compose();
  void Conclude(std::vector<NegotiationMessage> messages);
  void FinishRecall(const std::vector<NegotiationMessage>& messages);
  void Act(const Decision& decision);
  void StartNegotiated(const Decision& decision);
  void BuildSchedule();
  void Fail(const std::string& name, const Status& why);
  void Done(const std::shared_ptr<RequestState>& request);

  const int id_;
  const std::vector<int> ranks_;
  const int member_;
  const Options options_;
  const ExchangeEnv env_;
  WireOut* const wire_;
  LaneOwner* const owner_;

  std::unordered_map<std::string, std::shared_ptr<RequestState>> in_flight_;
  std::vector<std::shared_ptr<RequestState>> unannounced_;
  Clock::time_point oldest_unannounced_;

  uint64_t sequence_ = 0;  // of the negotiation that is open
  bool spoken_ = false;    // our message with that number is out
  std::map<uint64_t, std::vector<std::optional<NegotiationMessage>>> heard_;

  TensorCache cache_;
  Negotiator negotiator_;
  Executor executor_;

  std::optional<Schedule> schedule_;
  uint32_t next_schedule_ = 0;
  bool came_again_ = false;  // a known tensor was negotiated: worth a schedule
  enum class Recall { kNo, kWanted, kCounting } recall_ = Recall::kNo;
  std::vector<uint32_t> missing_;  // to be said with the recall
  std::vector<uint32_t> stale_;
  std::vector<uint32_t> all_stale_;  // said by anyone: leave the cache when the recall is over
  int64_t fusion_bytes_;
  int64_t wanted_fusion_bytes_;
  int64_t num_predicted_ = 0;
  std::unique_ptr<Tuner> tuner_;  // on the first member of the global set, if asked for

  bool joined_ = false;
  bool joined_said_ = false;
  Status closed_;  // not OK: a member has gone
};

}  // namespace dad
