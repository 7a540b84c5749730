// A lane and its schedule: when one is built, which requests go by it, and how it is taken back.
#include <algorithm>

#include "runtime/lane/batch_id.h"
#include "runtime/lane/lane.h"
#include "runtime/observe/timeline.h"
#include "util/log.h"

namespace dad {
namespace {

// A batch that has been incomplete for this long, with nothing new arriving, will not be completed.
// Users who wait are noticed at once; this timeout is for those who do not.
constexpr std::chrono::milliseconds kPatience{1000};

// A tensor that was negotiated twice is worth a schedule. The schedule is built where a step
// begins, since otherwise batches whose first tensors have left already would wait for them, or
// after this many steps if no rank has seen the beginning of one.
constexpr int kWorthASchedule = 2;
constexpr int kOverdue = 5;

// A tensor whose shape has changed this often is always negotiated: each change costs a recall.
constexpr int kRestless = 3;

}  // namespace

void Lane::Note(const Decision& decision) {
  for (const Decision::Ready& ready : decision.ready) {
    const bool is_set =
        ready.meta.kind == OpKind::kAddProcessSet || ready.meta.kind == OpKind::kRemoveProcessSet;
    const auto changes = num_changes_.find(KeyOf(ready.meta));
    const bool restless = changes != num_changes_.end() && changes->second >= kRestless;
    if (!ready.meta.recurring || is_set || restless) continue;
    most_times_ = std::max(most_times_, cache_.Note(ready.meta, ready.phase_key));
  }
}

// The same on all ranks.
bool Lane::IsTimeToSchedule(const std::vector<NegotiationMessage>& messages,
                            const Decision& decision) const {
  if (schedule_.has_value() || most_times_ < kWorthASchedule) return false;
  if (negotiator_.any_joined() || decision.last_joined >= 0) return false;
  return most_times_ >= kOverdue ||
         std::all_of(messages.begin(), messages.end(),
                     [](const NegotiationMessage& message) { return message.begins; });
}

bool Lane::IsScheduled(const RequestKey& key) const {
  const auto id = cache_.Find(key);
  return id.has_value() && cache_.Get(*id)->scheduled;
}

void Lane::BuildSchedule() {
  Result<Schedule> built = Schedule::Build(next_schedule_++, cache_, fusion_bytes_, env_, ranks_);
  if (!built.ok()) return wire_->Fatal(member_, built.status().message());
  schedule_.emplace(std::move(built).value());
  DAD_LOG(Debug) << "process set " << id_ << ": schedule " << schedule_->id() << " has "
                 << schedule_->batches().size() << " batches";

  ForgetTimes();

  // Requests that wait in the negotiation and are scheduled now use the schedule.
  auto scheduled = [this](const RequestKey& key) { return IsScheduled(key); };
  std::vector<std::shared_ptr<RequestState>> waiting;
  for (const auto& [key, missing] : negotiator_.Waiting()) {
    auto mine = in_flight_.find(key);
    const bool announced_here = mine != in_flight_.end() &&
                                std::find(missing.begin(), missing.end(),
                                          ranks_[static_cast<size_t>(member_)]) == missing.end();
    if (!announced_here) continue;
    if (scheduled(key)) {
      waiting.push_back(mine->second);
    } else {
      RecallOtherKinds(key);
    }
  }
  negotiator_.Drop(scheduled);
  waiting.insert(waiting.end(), unannounced_.begin(), unannounced_.end());
  unannounced_.clear();
  for (const auto& request : waiting) Route(request);
}

// Something new is to be included. The same on all ranks.
bool Lane::IsOutgrown() const {
  return most_times_ >= kWorthASchedule && !negotiator_.any_joined() && schedule_.has_value() &&
         !schedule_->batches().empty();
}

void Lane::ForgetTimes() {
  most_times_ = 0;
  for (uint32_t id = 0; id < cache_.end_id(); ++id) {
    if (CacheEntry* entry = cache_.Get(id)) entry->times = 0;
  }
}

bool Lane::TrySchedule(const std::shared_ptr<RequestState>& request) {
  if (!schedule_.has_value() || recall_ == Recall::kCounting) return false;
  const auto cache_id = cache_.Find(request->key);
  if (!cache_id.has_value() || !cache_.Get(*cache_id)->scheduled) return false;
  Difference difference;
  if (Differ(cache_.Get(*cache_id)->meta, request->meta, &difference)) {
    // The other ranks may send what this rank will not, so they have to be told.
    AskRecall({}, {*cache_id});
    return false;
  }
  const std::span<const uint32_t> batches = schedule_->BatchesOf(*cache_id);
  request->parts_left = 0;
  for (uint32_t index : batches) {
    ScheduledBatch& batch = schedule_->batches()[index];
    request->parts_left += static_cast<int>(batch.parts_of.at(*cache_id).size());
    if (batch.present.empty()) {
      batch.first_present = wire_->Now();
      schedule_->incomplete().insert(index);
    }
    batch.present[*cache_id] = request;
  }
  // Count the parts before any batch starts: a batch that ends at once must not end the request.
  for (uint32_t index : batches) {
    const ScheduledBatch& batch = schedule_->batches()[index];
    if (batch.present.size() == batch.members.size()) {
      Commit(index);
    } else {
      Prepare(batch, *cache_id, *request);
    }
  }
  return true;
}

// While others are still due: work that is done now need not be done when all wait for it.
void Lane::Prepare(const ScheduledBatch& batch, uint32_t cache_id, RequestState& request) {
  for (uint32_t place : batch.parts_of.at(cache_id)) {
    const ScheduledPart& part = batch.parts[place];
    part.exchange->Prepare(InputOf(request, part.tensor), WholeGroup());
  }
}

void Lane::Commit(uint32_t index) {
  ScheduledBatch& batch = schedule_->batches()[index];
  std::vector<BatchPart> parts;
  parts.reserve(batch.parts.size());
  for (const ScheduledPart& part : batch.parts) {
    parts.push_back({part.exchange, batch.present.at(part.cache_id), part.tensor});
  }
  batch.present.clear();
  schedule_->incomplete().erase(index);
  under_way_ = true;
  ++num_predicted_;
  if (tuner_ && index == 0) {
    if (auto fusion_bytes = tuner_->StepBegins(wire_->Now())) Retune(*fusion_bytes);
  }
  executor_.Start(ScheduledBatchId(schedule_->id(), index, ++batch.committed), batch.signature,
                  std::move(parts), WholeGroup());
}

// The other ranks take over the size when they build the next schedule.
void Lane::Retune(int64_t fusion_bytes) {
  wanted_fusion_bytes_ = fusion_bytes;
  AskRecall({}, {});
}

std::vector<uint32_t> Lane::MissingOf(const ScheduledBatch& batch) const {
  std::vector<uint32_t> missing;
  for (uint32_t id : batch.members) {
    if (!batch.present.contains(id)) missing.push_back(id);
  }
  return missing;
}

std::optional<Lane::Clock::time_point> Lane::PatienceEnds(const ScheduledBatch& batch) {
  std::optional<Clock::time_point> ends;
  for (const auto& [id, request] : batch.present) {
    if (request->waited_for) return Clock::time_point();
    if (request->polled) ends = batch.first_present + kPatience;
  }
  return ends;
}

// A user who waits for a tensor will not submit those that its batch lacks.
void Lane::LosePatience() {
  if (!schedule_.has_value() || recall_ != Recall::kNo) return;
  for (uint32_t index : schedule_->incomplete()) {
    const ScheduledBatch& batch = schedule_->batches()[index];
    const auto ends = PatienceEnds(batch);
    if (ends.has_value() && *ends <= wire_->Now()) AskRecall(MissingOf(batch), {});
  }
}

// Ranks that have scheduled this name as another collective, which this rank has not submitted, may
// mean the same tensor. The negotiation finds out.
void Lane::RecallOtherKinds(const RequestKey& key) {
  if (!schedule_.has_value()) return;
  RequestKey other = key;
  for (int kind = 0; kind < static_cast<int>(OpKind::kBarrier); ++kind) {
    other.kind = static_cast<OpKind>(kind);
    if (other.kind != key.kind && IsScheduled(other) && !in_flight_.contains(other)) {
      return AskRecall({}, {});
    }
  }
}

void Lane::AskRecall(const std::vector<uint32_t>& missing, const std::vector<uint32_t>& stale) {
  if (recall_ == Recall::kCounting) return;
  recall_ = Recall::kWanted;
  missing_.insert(missing_.end(), missing.begin(), missing.end());
  stale_.insert(stale_.end(), stale.begin(), stale.end());
}

void Lane::TraceRecall(const std::vector<NegotiationMessage>& messages) const {
  Timeline::Recall recall;
  recall.schedule = schedule_->id();
  auto add_names = [this](const std::vector<uint32_t>& ids, std::vector<std::string>& names) {
    for (uint32_t id : ids) {
      if (const CacheEntry* entry = cache_.Get(id)) names.push_back(entry->meta.name);
    }
  };
  for (size_t member = 0; member < messages.size(); ++member) {
    if (!messages[member].recall) continue;
    recall.ranks.push_back(ranks_[member]);
    add_names(messages[member].missing, recall.missing);
    add_names(messages[member].stale, recall.changed);
  }
  wire_->timeline()->Recalled(recall, wire_->Now());
}

// Every rank has said how often it committed to each batch. A run that all ranks have sent is
// completed; one that only some have sent is withdrawn and negotiated.
void Lane::FinishRecall(const std::vector<NegotiationMessage>& messages) {
  std::vector<std::shared_ptr<RequestState>> again;
  auto back = [&](const std::shared_ptr<RequestState>& request) {
    if (std::find(again.begin(), again.end(), request) == again.end()) again.push_back(request);
  };
  std::vector<ScheduledBatch>& batches = schedule_->batches();
  const uint32_t schedule = schedule_->id();
  for (size_t i = 0; i < batches.size(); ++i) {
    uint32_t least = batches[i].committed;
    for (const NegotiationMessage& message : messages) {
      if (message.committed.size() != batches.size()) {
        return wire_->Fatal(member_, "ranks disagree on the schedule");
      }
      least = std::min(least, message.committed[i]);
    }
    for (const auto& [id, request] : batches[i].present) back(request);
    if (least > 0) {
      for (uint32_t id : batches[i].members) {
        if (CacheEntry* entry = cache_.Get(id)) entry->strikes = 0;
      }
    }
    if (batches[i].committed > least) {
      for (const auto& request : executor_.Cancel(
               ScheduledBatchId(schedule, static_cast<uint32_t>(i), batches[i].committed))) {
        back(request);
      }
    }
  }
  executor_.RetireSchedule(schedule);
  std::sort(all_missing_.begin(), all_missing_.end());
  all_missing_.erase(std::unique(all_missing_.begin(), all_missing_.end()), all_missing_.end());
  for (uint32_t id : all_missing_) {
    if (CacheEntry* entry = cache_.Get(id)) ++entry->strikes;
  }
  all_missing_.clear();
  for (uint32_t id = 0; id < cache_.end_id(); ++id) {
    if (CacheEntry* entry = cache_.Get(id)) entry->scheduled = false;
  }
  schedule_.reset();
  recall_ = Recall::kNo;
  // The rest of this step is negotiated; the next one begins with a new schedule.
  ForgetTimes();
  for (const auto& request : again) Route(request);
}

}  // namespace dad
