#include "runtime/lane/lane.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "exchange/collective/dense_ring.h"
#include "runtime/lane/batch_id.h"
#include "runtime/lane/fuser.h"
#include "runtime/observe/timeline.h"
#include "util/hash.h"
#include "util/log.h"

namespace dad {
namespace {

// Below this rate in bytes per second, steps wait for the line. A ring uses it best, because
// connections to several peers share it unevenly. On faster lines steps wait for the work of the
// ranks, and both a ring and packing need more of it.
constexpr double kSlowLine = 50e6;

}  // namespace

// A longer ring must have more to do. Two ranks are each other's only peer in any case.
int64_t RingBytes(int64_t bytes_per_rank, size_t num_members) {
  const bool makes_sense = bytes_per_rank > 0 && num_members > 2 && num_members <= kMaxRingSize;
  return makes_sense ? bytes_per_rank * static_cast<int64_t>(num_members) : 0;
}

Lane::Lane(int id, std::vector<int> ranks, int my_rank, const Options& options,
           const ExchangeEnv& env, WireOut* wire, LaneOwner* owner)
    : id_(id),
      ranks_(std::move(ranks)),
      member_(MemberOf(my_rank)),
      options_(options),
      env_(env),
      wire_(wire),
      owner_(owner),
      cache_(static_cast<size_t>(options.cache_capacity)),
      negotiator_(ranks_, &cache_, options.join_strict),
      executor_(member_, ranks_, wire,
                [this](const std::shared_ptr<RequestState>& request) { Done(request); }),
      fusion_bytes_(options.fusion_bytes),
      wanted_fusion_bytes_(options.fusion_bytes) {
  if (options.autotune && id == 0 && member_ == 0) {
    tuner_ = std::make_unique<Tuner>(options.fusion_bytes, options.autotune_log);
  }
}

int Lane::MemberOf(int rank) const {
  auto found = std::find(ranks_.begin(), ranks_.end(), rank);
  return found == ranks_.end() ? -1 : static_cast<int>(found - ranks_.begin());
}

bool Lane::ComputesOnDevice(const RequestState& request) const {
  if (env_.bench == nullptr || request.request.tensors.empty()) return false;
  return TakesFromDevice(SpecOf(request.meta, 0, ranks_), request.request.tensors[0], env_);
}

bool Lane::MustComputeOnDevice(const RequestState& request) const {
  if (request.meta.tensors.empty()) return false;
  return dad::MustComputeOnDevice(SpecOf(request.meta, 0, ranks_), env_);
}

void Lane::Submit(std::shared_ptr<RequestState> request) {
  if (!closed_.ok()) {
    request->first_error = closed_;
    return owner_->Completed(request);
  }
  if (const Status* why = WhyGivenUp(*request)) return request->Complete(*why);
  const auto [entry, inserted] = in_flight_.emplace(request->key, request);
  if (!inserted) {
    return request->Complete(Status::InvalidArgument(
        "\"" + request->meta.name +
        "\": a tensor of this name is in flight already; names must be unique until a "
        "collective is done"));
  }
  Route(request);
}

// By the schedule if it fits, else through negotiation.
void Lane::Route(std::shared_ptr<RequestState> request) {
  if (const Status* why = WhyGivenUp(*request)) {
    AskRecall({}, {});  // other ranks may be waiting for it
    request->first_error = *why;
    return Done(request);
  }
  if (TrySchedule(request)) return;
  RecallOtherKinds(request->key);
  request->parts_left = 0;
  if (unannounced_.empty()) oldest_unannounced_ = wire_->Now();
  unannounced_.push_back(request);
}

void Lane::SetJoined(bool joined) {
  joined_ = joined;
  // No schedule: a rank that has joined answers for tensors that it does not have.
  if (joined && schedule_.has_value()) AskRecall({}, {});
}

// It announced the previous join, which the others count as over, but not yet this one.
bool Lane::JoinedAnew() const {
  return joined_ && joined_said_ && joins_said_ != owner_->num_joins();
}

void Lane::OnMessage(int member, const MessageHeader& header, AlignedBuffer payload) {
  if (header.kind == MessageKind::kData) {
    return executor_.OnData(member, header, std::move(payload));
  }
  if (header.kind == MessageKind::kLeft) {
    return executor_.OnLeft(member, header, std::move(payload));
  }
  Result<NegotiationMessage> message = DecodeNegotiation(payload.span());
  if (!message.ok()) return wire_->Fatal(member, message.status().message());
  auto& round = heard_[header.batch];
  round.resize(num_members());
  round[static_cast<size_t>(member)] = {std::move(message).value(), wire_->Now()};
}

void Lane::Pump() {
  LosePatience();
  for (;;) {
    for (const auto& [member, why] : gone_) {
      executor_.MemberGone(member, why);
      // What it said before it left may be all that the other ranks need.
      if (closed_.ok() && !HasHeard(member)) {
        Close(why);
        executor_.StartNoMore(why);
      }
    }
    if (!closed_.ok()) return;
    if (!spoken_) {
      const bool asked = heard_.contains(sequence_);
      const bool news = !unannounced_.empty() && wire_->Now() >= GatherUntil();
      if (!asked && !news && recall_ == Recall::kNo && joined_ == joined_said_ && !JoinedAnew() &&
          !HasSettled() && withdrawn_.empty()) {
        return;
      }
      Speak();
    }
    auto round = heard_.find(sequence_);
    const bool all = std::all_of(round->second.begin(), round->second.end(),
                                 [](const auto& message) { return message.has_value(); });
    if (!all) return;
    std::vector<NegotiationMessage> messages;
    heard_at_.clear();
    for (auto& heard : round->second) {
      messages.push_back(std::move(heard->message));
      heard_at_.push_back(heard->at);
    }
    heard_.erase(round);
    ++sequence_;
    spoken_ = false;
    Conclude(std::move(messages));
  }
}

bool Lane::HasHeard(int member) const {
  const auto round = heard_.find(sequence_);
  return round != heard_.end() && round->second[static_cast<size_t>(member)].has_value();
}

std::optional<Lane::Clock::time_point> Lane::NextDeadline() const {
  std::optional<Clock::time_point> deadline;
  auto sooner = [&](Clock::time_point at) {
    if (!deadline.has_value() || at < *deadline) deadline = at;
  };
  if (!unannounced_.empty() && !spoken_) {
    sooner(GatherUntil());
  }
  if (schedule_.has_value() && recall_ == Recall::kNo) {
    for (uint32_t index : schedule_->incomplete()) {
      if (const auto ends = PatienceEnds(schedule_->batches()[index])) sooner(*ends);
    }
  }
  return deadline;
}

Lane::Clock::time_point Lane::GatherUntil() const {
  return oldest_unannounced_ +
         std::chrono::microseconds(static_cast<int64_t>(options_.cycle_time_ms * 1000));
}

void Lane::Speak() {
  NegotiationMessage message = Compose();
  const std::vector<std::byte> bytes = Encode(message);
  for (size_t offset = 1; offset < num_members(); ++offset) {
    MessageHeader header;
    header.kind = MessageKind::kNegotiate;
    header.batch = sequence_;
    GatherBuffer payload;
    payload.Append(bytes);
    wire_->Send(static_cast<int>((static_cast<size_t>(member_) + offset) % num_members()), header,
                std::move(payload), nullptr);
  }
  auto& round = heard_[sequence_];
  round.resize(num_members());
  round[static_cast<size_t>(member_)] = {std::move(message), wire_->Now()};
  spoken_ = true;
}

NegotiationMessage Lane::Compose() {
  NegotiationMessage message;
  message.fusion_bytes = wanted_fusion_bytes_;
  // The join may end with this message, and nobody answers for joined ranks after that. So requests
  // that were submitted by the schedule are announced first, after the recall that SetJoined has
  // asked for.
  const bool unannounced = schedule_.has_value() && !in_flight_.empty();
  message.joined = joined_said_ = joined_ && !unannounced;
  message.joins = joins_said_ = owner_->num_joins();
  message.pending = pending_said_ = message.joined && IsPending();
  message.begins = !under_way_;
  const bool by_the_line = options_.ring_bytes < 0 || options_.pack < 0;
  const double line_rate = by_the_line ? wire_->LineRate() : 0;
  message.slow_line = line_rate > 0 && line_rate < kSlowLine;
  if (recall_ == Recall::kWanted && schedule_.has_value()) {
    message.recall = true;
    message.missing = std::move(missing_);
    message.stale = std::move(stale_);
  } else if (recall_ == Recall::kCounting) {
    for (const ScheduledBatch& batch : schedule_->batches()) {
      message.committed.push_back(batch.committed);
    }
  }
  if (recall_ == Recall::kWanted) recall_ = Recall::kNo;
  missing_.clear();
  stale_.clear();
  message.withdrawn = std::exchange(withdrawn_, {});
  for (const auto& request : unannounced_) {
    const auto cache_id = cache_.Find(request->key);
    Difference difference;
    if (cache_id.has_value() && !Differ(cache_.Get(*cache_id)->meta, request->meta, &difference)) {
      message.known.push_back({*cache_id, request->phase});
    } else {
      message.fresh.push_back({request->meta, request->phase});
    }
  }
  unannounced_.clear();
  std::sort(message.known.begin(), message.known.end(),
            [](const auto& a, const auto& b) { return a.cache_id < b.cache_id; });
  return message;
}

void Lane::Conclude(std::vector<NegotiationMessage> messages) {
  wire_->timeline()->Cycle();
  last_cycle_ = wire_->Now();
  const bool counted = recall_ == Recall::kCounting;
  if (counted) FinishRecall(messages);
  Result<Decision> decision = negotiator_.Decide(messages);
  if (!decision.ok()) return wire_->Fatal(member_, decision.status().message());
  for (const Decision::Failed& failed : decision.value().failed) {
    cache_.Remove(failed.key);
    const Status why = Status::FailedPrecondition(failed.message);
    const auto mine = in_flight_.find(failed.key);
    if (mine == in_flight_.end() || executor_.Carries(mine->second)) continue;
    NoteGivenUp(mine->second->request.step, why);
    Fail(failed.key, why);
  }
  Note(decision.value());
  if (!schedule_.has_value()) fusion_bytes_ = messages[0].fusion_bytes;
  const bool schedules = IsTimeToSchedule(messages, decision.value());
  if (schedules) {
    FitToLine(std::any_of(messages.begin(), messages.end(),
                          [](const NegotiationMessage& m) { return m.slow_line; }));
    BuildSchedule();
    // Other ranks did not know of it when they sent their messages.
    if (joined_) AskRecall({}, {});
  }
  Start(decision.value(), schedules);
  if (must_take_back_) TakeBack();
  if (decision.value().last_joined >= 0) {
    joined_said_ = false;
    // In a smaller set that may become known late: this rank may have joined again since it spoke.
    if (messages[static_cast<size_t>(member_)].joins == owner_->num_joins()) joined_ = false;
    // A smaller set may be complete while other ranks are still running; join() concerns all ranks.
    if (id_ == 0) owner_->AllJoined(ranks_[static_cast<size_t>(decision.value().last_joined)]);
  }
  if (counted) {
    // Not earlier: the messages of this round may refer to them by number.
    for (uint32_t id : all_stale_) {
      const CacheEntry* entry = cache_.Get(id);
      if (entry == nullptr) continue;
      const RequestKey key = KeyOf(entry->meta);
      ++num_changes_[key];
      cache_.Remove(key);
    }
    all_stale_.clear();
  }

  bool recalled = false;
  for (const NegotiationMessage& message : messages) {
    if (!message.recall) continue;
    recalled = true;
    all_missing_.insert(all_missing_.end(), message.missing.begin(), message.missing.end());
    all_stale_.insert(all_stale_.end(), message.stale.begin(), message.stale.end());
  }
  if (recalled && schedule_.has_value()) TraceRecall(messages);
  if (IsOutgrown() || (recalled && schedule_.has_value())) {
    // From here to the count no rank commits: the next message of each rank says how many runs it
    // had committed.
    recall_ = Recall::kCounting;
  }
}

// A ring stays, because its sums have other last bits. Packing leaves no such traces. The rate is
// that of all data sent so far, so a later rate is more reliable than that of the first step.
void Lane::FitToLine(bool slow) {
  if (slow && options_.ring_bytes < 0 && env_.ring_bytes == 0) {
    env_.ring_bytes = RingBytes(kRingBytesPerRank, num_members());
    DAD_LOG(Debug) << "process set " << id_ << ": the line is slow; large tensors go around a ring";
  }
  if (options_.pack < 0 && env_.pack != slow) {
    env_.pack = slow;
    DAD_LOG(Debug) << "process set " << id_ << ": the line is " << (slow ? "slow" : "fast")
                   << "; values travel " << (slow ? "packed" : "as they are");
  }
}

std::vector<int> Lane::AbsentRanks(const Decision::Ready& ready) const {
  std::vector<int> absent;
  for (size_t member = 0; member < ready.absent.size(); ++member) {
    if (ready.absent[member]) absent.push_back(ranks_[member]);
  }
  return absent;
}

// Records which of the members that announced the tensor in this round was heard last.
void Lane::NoteLast(const Decision::Ready& ready, RequestState& request) const {
  request.negotiated = true;
  for (int member : ready.last) {
    const Clock::time_point at = heard_at_[static_cast<size_t>(member)];
    if (request.last_rank >= 0 && at < request.ready) continue;
    request.last_rank = ranks_[static_cast<size_t>(member)];
    request.ready = at;
  }
}

// `scheduled`: tensors in the new schedule use it.
void Lane::Start(const Decision& decision, bool scheduled) {
  std::vector<FuseItem> items;
  for (size_t i = 0; i < decision.ready.size(); ++i) {
    const RequestMeta& meta = decision.ready[i].meta;
    if (meta.kind == OpKind::kAddProcessSet || meta.kind == OpKind::kRemoveProcessSet) {
      auto mine = in_flight_.find(KeyOf(meta));
      std::shared_ptr<RequestState> request = mine == in_flight_.end() ? nullptr : mine->second;
      if (request) Land(KeyOf(meta));
      owner_->ProcessSetDecided(meta, request);
      continue;
    }
    if (scheduled && IsScheduled(KeyOf(meta))) {
      Route(in_flight_.at(KeyOf(meta)));
      continue;
    }
    // Only requests with the same participants can share a batch.
    uint64_t key = kHashSeed;
    for (bool absent : decision.ready[i].absent) key = HashCombine(key, absent ? 1 : 0);
    AppendFuseItems(meta, static_cast<int>(i), key, env_, items);
  }

  const std::vector<FusedBatch> batches = Fuse(items, fusion_bytes_);
  auto mine = [&](int index) -> std::shared_ptr<RequestState> {
    const Decision::Ready& ready = decision.ready[static_cast<size_t>(index)];
    if (!ready.absent.empty() && ready.absent[static_cast<size_t>(member_)]) return nullptr;
    return in_flight_.at(KeyOf(ready.meta));
  };
  for (const FusedBatch& batch : batches) {
    for (const FusedBatch::Part& part : batch.parts) {
      if (auto request = mine(part.request)) {
        if (request->parts_left == 0) {
          request->absent = AbsentRanks(decision.ready[static_cast<size_t>(part.request)]);
          NoteLast(decision.ready[static_cast<size_t>(part.request)], *request);
        }
        ++request->parts_left;
        under_way_ = true;
      }
    }
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    const auto first = static_cast<size_t>(batches[i].parts[0].request);
    Group group{member_, static_cast<int>(num_members()), decision.ready[first].absent};
    std::vector<BatchPart> parts;
    uint64_t signature = kHashSeed;
    for (const FusedBatch::Part& part : batches[i].parts) {
      const RequestMeta& meta = decision.ready[static_cast<size_t>(part.request)].meta;
      TensorSpec spec = SpecOf(meta, static_cast<size_t>(part.tensor), ranks_);
      spec.on_device = GoesOnDevice(meta, env_);
      Result<std::unique_ptr<Exchange>> exchange =
          MakeExchange(spec, part.slice, batches[i].bytes, env_);
      if (!exchange.ok()) return wire_->Fatal(member_, exchange.status().message());
      parts.push_back({std::move(exchange).value(), mine(part.request), part.tensor});
      signature = HashPart(signature, meta, part.tensor, part.slice);
    }
    executor_.Start(NegotiatedBatchId(sequence_, static_cast<uint32_t>(i)), signature,
                    std::move(parts), group);
  }
}

void Lane::Fail(const RequestKey& key, const Status& why) {
  auto found = in_flight_.find(key);
  if (found == in_flight_.end()) return;
  std::shared_ptr<RequestState> request = found->second;
  // Nothing may answer for it any more.
  std::erase(unannounced_, request);
  if (schedule_.has_value() && schedule_->Forget(request)) AskRecall({}, {});
  request->first_error = why;
  Done(request);
}

void Lane::GiveUp(uint64_t step, const Status& why) {
  NoteGivenUp(step, why);
  // Otherwise the decision that is due may be to start what this rank has said to be ready.
  if (must_take_back_ && !spoken_) TakeBack();
}

void Lane::NoteGivenUp(uint64_t step, const Status& why) {
  constexpr size_t kMostGivenUp = 16;
  const bool known = std::any_of(given_up_.begin(), given_up_.end(),
                                 [step](const auto& given_up) { return given_up.first == step; });
  if (step == 0 || known) return;
  given_up_.emplace_back(step, why);
  if (given_up_.size() > kMostGivenUp) given_up_.pop_front();
  must_take_back_ = true;
}

// The next message announces this, and no decision precedes it: a request that a rank submits again
// is never combined with the earlier one of another rank.
void Lane::TakeBack() {
  must_take_back_ = false;
  std::vector<std::pair<std::shared_ptr<RequestState>, Status>> gone;
  for (const auto& [key, request] : in_flight_) {
    if (const Status* why = WhyGivenUp(*request)) gone.emplace_back(request, *why);
  }
  for (const auto& [request, why] : gone) {
    const bool announced = negotiator_.Waits(member_, request->key);
    if (announced) withdrawn_.push_back(request->key);
    if (announced || std::erase(unannounced_, request) > 0) {
      Fail(request->key, why);
    } else if (!request->ended) {
      AskRecall({}, {});  // it may be in a batch that other ranks will not complete
    }
  }
}

const Status* Lane::WhyGivenUp(const RequestState& request) const {
  if (request.request.step == 0) return nullptr;
  for (const auto& [step, why] : given_up_) {
    if (step == request.request.step) return &why;
  }
  return nullptr;
}

void Lane::Done(std::shared_ptr<RequestState> request) {
  if (request->leaving > 0) {  // the memory still belongs to the batch
    request->ended = true;
    return;
  }
  Land(request->key);
  owner_->Completed(request);
}

void Lane::Land(const RequestKey& key) {
  in_flight_.erase(key);
  if (in_flight_.empty()) under_way_ = false;
}

void Lane::MemberGone(int member, const Status& why) { gone_.emplace(member, why); }

void Lane::Remove(const Status& why) {
  executor_.LeaveAll(why);
  Close(why);
}

// What is left in flight is either in a batch that can still finish, or waits for an agreement that
// will not come.
void Lane::Close(const Status& why) {
  closed_ = why;
  unannounced_.clear();
  schedule_.reset();
  std::vector<std::shared_ptr<RequestState>> stuck;
  for (const auto& [key, request] : in_flight_) {
    if (!executor_.Carries(request)) stuck.push_back(request);
  }
  for (const auto& request : stuck) {
    request->first_error = why;
    Done(request);
  }
}

void Lane::FailAll(const Status& why) {
  Close(why);
  executor_.FailAll(why);
  auto in_flight = std::move(in_flight_);
  in_flight_.clear();
  for (const auto& [key, request] : in_flight) {
    if (request->first_error.ok()) request->first_error = why;
    owner_->Completed(request);
  }
}

std::vector<bool> Lane::Awaited() const {
  std::vector<bool> awaited = executor_.Awaited();
  for (size_t m = 0; closed_.ok() && spoken_ && m < num_members(); ++m) {
    if (!HasHeard(static_cast<int>(m))) awaited[m] = true;
  }
  for (const auto& [key, missing] : negotiator_.Waiting()) {
    if (!in_flight_.contains(key)) continue;
    for (int rank : missing) awaited[static_cast<size_t>(MemberOf(rank))] = true;
  }
  awaited[static_cast<size_t>(member_)] = false;
  return awaited;
}

std::vector<Wanted> Lane::WantedHere() const {
  std::vector<Wanted> wanted;
  const int me = ranks_[static_cast<size_t>(member_)];
  for (const auto& [key, missing] : negotiator_.Waiting()) {
    const auto lacks = [&missing](int rank) {
      return std::find(missing.begin(), missing.end(), rank) != missing.end();
    };
    if (!lacks(me) || in_flight_.contains(key)) continue;
    Wanted& one = wanted.emplace_back();
    one.name = key.name;
    std::copy_if(ranks_.begin(), ranks_.end(), std::back_inserter(one.ranks), std::not_fn(lacks));
  }
  if (!schedule_.has_value()) return wanted;
  for (size_t i = 0; i < schedule_->batches().size(); ++i) {
    const ScheduledBatch& batch = schedule_->batches()[i];
    const uint64_t next =
        ScheduledBatchId(schedule_->id(), static_cast<uint32_t>(i), batch.committed + 1);
    std::vector<int> ranks;
    for (int member : executor_.EarlyMembers(next)) {
      ranks.push_back(ranks_[static_cast<size_t>(member)]);
    }
    if (ranks.empty()) continue;
    for (uint32_t id : MissingOf(batch)) {
      if (const CacheEntry* entry = cache_.Get(id)) wanted.push_back({entry->meta.name, ranks});
    }
  }
  return wanted;
}

void Lane::Describe(Snapshot& snapshot) const {
  const Clock::time_point now = wire_->Now();
  std::unordered_map<const RequestState*, std::vector<int>> waits_for;
  for (const Stalled& stalled : StalledSince(now)) waits_for[stalled.request.get()] = stalled.ranks;
  for (const auto& [key, request] : in_flight_) {
    Snapshot::Open& open = snapshot.requests.emplace_back();
    open.what = std::string(Name(key.kind)) + " \"" + request->meta.name + "\"";
    open.seconds = std::chrono::duration<double>(now - request->submitted).count();
    open.waits_for = waits_for[request.get()];
  }
  executor_.Describe(snapshot);
  for (Wanted& wanted : WantedHere()) {
    snapshot.missing.push_back({std::move(wanted.name), std::move(wanted.ranks)});
  }
}

std::vector<Lane::Stalled> Lane::StalledSince(Clock::time_point since) const {
  std::vector<Stalled> stalled;
  for (const auto& [key, missing] : negotiator_.Waiting()) {
    auto mine = in_flight_.find(key);
    if (mine == in_flight_.end() || mine->second->submitted > since) continue;
    stalled.push_back({mine->second, missing, /*is_ready=*/false});
  }
  for (const Executor::Late& late : executor_.LateSince(since)) {
    std::vector<int> ranks;
    for (int m : late.members) ranks.push_back(ranks_[static_cast<size_t>(m)]);
    stalled.push_back({late.request, ranks, late.round > 0});
  }
  return stalled;
}

}  // namespace dad
