#include "runtime/execute/executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/execute/executor_batch.h"
#include "runtime/lane/batch_id.h"
#include "runtime/observe/timeline.h"
#include "util/byte_io.h"

namespace dad {

StepInput InputOf(RequestState& request, int tensor) {
  StepInput input;
  input.mine = request.request.tensors.data() + tensor;  // a barrier has none
  input.received_splits = &request.splits;
  input.report = &request.report;
  input.submit_id = request.submit_id;
  input.allocate = [&request, tensor](const Shape& shape) {
    return request.request.allocate(tensor, request.meta.tensors[static_cast<size_t>(tensor)].dtype,
                                    shape);
  };
  return input;
}

Executor::Executor(int member, std::vector<int> ranks, WireOut* wire,
                   std::function<void(const std::shared_ptr<RequestState>&)> done)
    : member_(member),
      ranks_(std::move(ranks)),
      num_members_(static_cast<int>(ranks_.size())),
      wire_(wire),
      done_(std::move(done)) {}

Executor::~Executor() = default;

void Executor::Start(uint64_t id, uint64_t signature, std::vector<BatchPart> parts,
                     const Group& group) {
  auto owned = std::make_unique<Batch>();
  Batch& batch = *owned;
  batch.id = id;
  batch.signature = signature;
  batch.parts = std::move(parts);
  batch.group = group;
  batch.round_started = wire_->Now();
  for (BatchPart& part : batch.parts) {
    StepInput input;
    if (part.request) {
      RequestState& request = *part.request;
      input = InputOf(request, part.tensor);
      if (request.started == std::chrono::steady_clock::time_point()) {
        request.started = batch.round_started;
        const auto traffic = traffic_.find(request.key.tensor());
        request.step = 1 + (traffic == traffic_.end() ? 0 : traffic->second.steps);
        wire_->timeline()->Started(request);
      }
    }
    if (Status status = part.exchange->Begin(input, group); !status.ok()) {
      // All ranks agreed on what Begin depends on, so users cannot cause this.
      wire_->Fatal(member_, status.message());
      return;
    }
    batch.num_rounds = std::max(batch.num_rounds, part.exchange->num_rounds());
  }
  batch.shares.resize(batch.num_rounds);
  for (auto& round : batch.shares) round.resize(num_members_);
  ExpectNothingFromSilent(batch);
  running_[id] = std::move(owned);
  OfferDestinations(batch);
  if (!SendOrHold(batch)) return;

  if (auto found = early_.find(id); found != early_.end()) {
    std::vector<Early> early = std::move(found->second);
    early_.erase(found);
    for (Early& message : early) {
      if (message.header.kind == MessageKind::kLeft) {
        return OnLeft(message.member, message.header, std::move(message.payload));
      }
      if (!Accept(batch, message.member, message.header, std::move(message.payload), message.at)) {
        return;
      }
    }
  }
  Advance(batch);
}

// Every rank sends round 0, which says "I agree".
void Executor::ExpectNothingFromSilent(Batch& batch) {
  for (int round = 1; round < batch.num_rounds; ++round) {
    for (int m = 0; m < num_members_; ++m) {
      batch.shares[round][m].arrived = m != member_ && !batch.Speaks(round, m, member_);
    }
  }
}

// Only for a batch of one part: a fused message has no single destination.
void Executor::OfferDestinations(Batch& batch) {
  if (batch.parts.size() != 1) return;
  Exchange& exchange = *batch.parts[0].exchange;
  for (int round = 1; round < exchange.num_rounds(); ++round) {
    for (int m = 0; m < num_members_; ++m) {
      if (m == member_) continue;
      std::span<std::byte> memory = exchange.Destination(round, m);
      if (memory.empty()) continue;
      wire_->OfferMemory(m, batch.id, round, memory);
      batch.offered.emplace_back(round, m);
    }
  }
}

// Returns false if the engine ends here.
bool Executor::SendOrHold(Batch& batch) {
  const Result<bool> ready = ReadyToSend(batch);
  batch.held = ready.ok() && !ready.value();
  if (batch.held) {
    held_.push_back(batch.id);
    return true;
  }
  const Status status = ready.ok() ? SendRound(batch) : ready.status();
  if (!status.ok()) wire_->Fatal(member_, status.message());
  return status.ok();
}

Result<bool> Executor::ReadyToSend(Batch& batch) {
  bool all = true;
  for (size_t i = 0; i < batch.parts.size(); ++i) {
    Exchange& exchange = *batch.parts[i].exchange;
    if (exchange.device() < 0 || batch.round >= exchange.num_rounds()) continue;
    batch.making.resize(batch.parts.size());
    DeviceEvent& event = batch.making[i];
    for (;;) {
      const Result<bool> passed = EventPassed(exchange.device(), event);
      if (!passed.ok()) return passed.status();
      if (!passed.value()) {
        all = false;
        break;
      }
      Result<DeviceEvent> next = exchange.Ready(batch.round);
      if (!next.ok()) return next.status();
      event = std::move(next).value();
      if (event == nullptr) break;
    }
  }
  return all;
}

void Executor::SendHeld() {
  for (uint64_t id : std::exchange(held_, {})) {
    const auto found = running_.find(id);
    if (found == running_.end() || found->second->finished) continue;  // cancelled or failed
    if (!SendOrHold(*found->second)) return;
    Advance(*found->second);
  }
}

Status Executor::SendRound(Batch& batch) {
  std::shared_ptr<SendPin> pin;
  for (int offset = 1; offset < num_members_; ++offset) {
    // Each rank starts with another peer, so no rank is the first target of all.
    const int peer = (member_ + offset) % num_members_;
    if (!batch.Speaks(batch.round, member_, peer)) continue;
    GatherBuffer payload;
    for (BatchPart& part : batch.parts) {
      Exchange& exchange = *part.exchange;
      if (batch.round >= exchange.num_rounds()) continue;
      const size_t before = payload.size();
      const bool says_length = exchange.SendsLength(batch.round, peer);
      const size_t length = says_length ? payload.ReserveLength() : 0;
      const size_t content = payload.size();
      DAD_RETURN_IF_ERROR(exchange.Send(batch.round, peer, payload));
      if (says_length) payload.SetLength(length, payload.size() - content);
      if (part.request) part.request->sent_bytes += static_cast<int64_t>(payload.size() - before);
    }
    MessageHeader header;
    header.kind = MessageKind::kData;
    header.round = static_cast<uint8_t>(batch.round);
    header.batch = batch.id;
    header.signature = batch.signature;
    std::shared_ptr<void> keep;
    if (payload.has_references()) {
      if (!pin) pin = batch.pin.lock();
      if (!pin) batch.pin = pin = wire_->MakePin(batch.id);
      keep = pin;
    }
    wire_->Send(peer, header, std::move(payload), std::move(keep));
  }
  return Status::Ok();
}

void Executor::OnData(int member, const MessageHeader& header, AlignedBuffer payload) {
  auto found = running_.find(header.batch);
  if (found == running_.end() && (left_.contains(header.batch) || IsRetired(header.batch))) return;
  if (found == running_.end() && !start_no_more_.ok()) {
    return TellLeft(member, header.batch, header.signature, start_no_more_);
  }
  if (found == running_.end()) {
    early_[header.batch].push_back({member, header, std::move(payload), wire_->Now()});
    return;
  }
  Batch& batch = *found->second;
  if (!Accept(batch, member, header, std::move(payload), wire_->Now())) return;
  if (!batch.finished) return Advance(batch);
  if (batch.shares[header.round][member].in_place) --batch.writing;
  ReleaseWhenUnused(batch);
}

void Executor::OnLeft(int member, const MessageHeader& header, AlignedBuffer payload) {
  auto found = running_.find(header.batch);
  if (found == running_.end()) {
    if (start_no_more_.ok() && !left_.contains(header.batch) && !IsRetired(header.batch)) {
      early_[header.batch].push_back({member, header, std::move(payload), wire_->Now()});
    }
    return;
  }
  ByteReader in(payload.span());
  const std::string why = in.Text();
  if (!in.ok() || header.signature != found->second->signature) {
    return wire_->Fatal(member, "sent a message that does not belong to the batch it names");
  }
  if (found->second->finished) return;
  LeaveAndTell(*found->second, Status::Aborted(why), [member](int m) { return m == member; });
}

bool Executor::Accept(Batch& batch, int member, const MessageHeader& header, AlignedBuffer payload,
                      std::chrono::steady_clock::time_point at) {
  if (header.signature != batch.signature || header.round >= batch.num_rounds ||
      batch.shares[header.round][member].arrived) {
    wire_->Fatal(member, "sent a message that does not belong to the batch it names");
    return false;
  }
  Share& share = batch.shares[header.round][member];
  share.arrived = true;
  share.at = at;
  share.num_bytes = header.payload_bytes;
  share.in_place = payload.size() == 0 && header.payload_bytes > 0;
  share.payload = std::move(payload);
  return true;
}

void Executor::Advance(Batch& batch) {
  if (batch.finished || batch.held) return;
  while (batch.RoundComplete()) {
    if (Status status = ReceiveRound(batch); !status.ok()) {
      return wire_->Fatal(member_, status.message());
    }
    for (Share& share : batch.shares[batch.round]) share.payload = AlignedBuffer();
    NoteRound(batch);
    if (++batch.round == batch.num_rounds) return Finish(batch);
    batch.round_started = wire_->Now();
    if (!SendOrHold(batch) || batch.held) return;
  }
}

// Records which rank kept the round waiting: the member whose message came last, or this rank if
// all messages were there when it began. In a scheduled batch the first round signals readiness.
void Executor::NoteRound(const Batch& batch) {
  Timeline::BatchRound round{batch.id,
                             batch.round,
                             batch.round_started,
                             wire_->Now(),
                             ranks_[static_cast<size_t>(member_)],
                             {}};
  auto last = batch.round_started;
  auto first = batch.round_started;
  for (int m = 0; m < num_members_; ++m) {
    const auto at = batch.shares[batch.round][m].at;
    if (at == std::chrono::steady_clock::time_point()) continue;  // it had nothing to send
    const int rank = ranks_[static_cast<size_t>(m)];
    round.arrived.emplace_back(rank, at);
    first = std::min(first, at);
    if (at <= last) continue;
    last = at;
    round.last_rank = rank;
  }
  for (const BatchPart& part : batch.parts) {
    if (!part.request || batch.round > 0 || part.request->negotiated) continue;
    if (part.request->last_rank >= 0 && last <= part.request->ready) continue;  // another slice
    part.request->last_rank = round.last_rank;
    part.request->ready = last;
    NoteLag(*part.request, last - first);
  }
  wire_->timeline()->Round(batch.parts, round);
}

// Only of tensors that come in every step; other names count steps of their own.
void Executor::NoteLag(const RequestState& request, std::chrono::steady_clock::duration lag) {
  if (!request.meta.recurring || request.last_rank < 0) return;
  lags_.Note(request.step, request.last_rank, std::chrono::duration<double>(lag).count());
}

Status Executor::ReceiveRound(Batch& batch) {
  // shares[part][member]
  std::vector<std::vector<ByteSpan>> shares(batch.parts.size(),
                                            std::vector<ByteSpan>(num_members_));
  for (int m = 0; m < num_members_; ++m) {
    if (m != member_) DAD_RETURN_IF_ERROR(SplitShare(batch, m, shares));
  }
  for (size_t i = 0; i < batch.parts.size(); ++i) {
    BatchPart& part = batch.parts[i];
    if (batch.round >= part.exchange->num_rounds()) continue;
    Status status = part.exchange->Receive(batch.round, shares[i]);
    if (status.ok()) continue;
    if (status.code() == StatusCode::kInvalidArgument || !part.request) return status;
    // Only this rank fails (no memory for the output); the other ranks continue.
    if (part.request->first_error.ok()) part.request->first_error = status;
  }
  return Status::Ok();
}

Status Executor::SplitShare(Batch& batch, int member, std::vector<std::vector<ByteSpan>>& shares) {
  const Share& share = batch.shares[batch.round][member];
  if (share.in_place) {
    shares[0][member] = batch.parts[0].exchange->Destination(batch.round, member);
    batch.parts[0].request->received_bytes += static_cast<int64_t>(share.num_bytes);
    return Status::Ok();
  }
  ByteSpan rest = share.payload.span();
  auto malformed = [&](const BatchPart& part) {
    const std::string name = part.request ? part.request->meta.name : std::string();
    return Status::InvalidArgument("malformed message for \"" + name + "\" from member " +
                                   std::to_string(member));
  };
  for (size_t i = 0; i < batch.parts.size(); ++i) {
    BatchPart& part = batch.parts[i];
    if (batch.round >= part.exchange->num_rounds()) continue;
    int64_t length = part.exchange->ReceiveBytes(batch.round, member);
    if (length < 0) {
      uint64_t prefix = 0;
      if (rest.size() < sizeof prefix) return malformed(part);
      std::memcpy(&prefix, rest.data(), sizeof prefix);
      rest = rest.subspan(sizeof prefix);
      if (prefix > rest.size()) return malformed(part);
      length = static_cast<int64_t>(prefix);
    }
    if (static_cast<size_t>(length) > rest.size()) return malformed(part);
    shares[i][member] = rest.first(static_cast<size_t>(length));
    rest = rest.subspan(static_cast<size_t>(length));
    if (part.request) part.request->received_bytes += length;
  }
  if (!rest.empty()) return malformed(batch.parts.back());
  return Status::Ok();
}

void Executor::Finish(Batch& batch) {
  batch.finished = true;
  for (BatchPart& part : batch.parts) {
    Status status = part.exchange->Finish();
    if (!status.ok() && part.request && part.request->first_error.ok()) {
      part.request->first_error = status;
    }
  }
  if (const DeviceTurn* turn = batch.parts[0].exchange->device_turn()) {
    DeviceTask task;
    task.batch = batch.id;
    task.turn = turn->number;
    task.some_absent = !batch.group.joined.empty();
    for (const BatchPart& part : batch.parts) {
      task.parts.push_back({*part.exchange->device_turn(), part.request, part.tensor});
    }
    return wire_->RunOnDevice(std::move(task));
  }
  ReleaseWhenUnused(batch);
}

// When a request is done, its memory belongs to the user again, so the bytes sent from it must have
// left, and those received must have arrived. Mostly they have.
void Executor::ReleaseWhenUnused(Batch& batch) {
  if (batch.writing > 0) return;
  if (std::shared_ptr<SendPin> pin = batch.pin.lock()) {
    pin->TellWhenReleased();
  } else {
    Release(batch);
  }
}

void Executor::OnSent(uint64_t id) {
  auto found = running_.find(id);
  if (found != running_.end() && found->second->finished) ReleaseWhenUnused(*found->second);
}

void Executor::OnDevice(const DeviceOutcome& outcome) {
  auto found = running_.find(outcome.task.batch);
  if (found == running_.end()) return;  // it failed meanwhile
  if (!outcome.status.ok() && outcome.status.code() != StatusCode::kInvalidArgument) {
    return wire_->Fatal(member_, outcome.status.message());
  }
  for (const DeviceTask::Part& part : outcome.task.parts) {
    if (!part.request) continue;
    RequestState& request = *part.request;
    if (!outcome.status.ok()) request.first_error = outcome.status;
    request.done = outcome.done;  // one stream, in order: the last is after all of them
    if (!outcome.status.ok() || part.turn.failed) continue;
    const auto tensor = static_cast<size_t>(part.tensor);
    request.device_bytes += static_cast<int64_t>(request.request.tensors[tensor].input.num_bytes());
  }
  Release(*found->second);
}

void Executor::Release(Batch& batch) {
  std::unique_ptr<Batch> owned = std::move(running_.at(batch.id));
  running_.erase(batch.id);
  for (BatchPart& part : owned->parts) {
    if (!part.request) continue;
    if (!owned->taken_back) {
      EndPart(part, owned->outcome);
    } else if (--part.request->leaving == 0 && part.request->ended) {
      done_(part.request);
    }
  }
}

void Executor::EndPart(BatchPart& part, const Status& status) {
  RequestState& request = *part.request;
  if (!status.ok() && request.first_error.ok()) request.first_error = status;
  // Also after a failed step: the device may still be using its tensors.
  if (DeviceEvent event = part.exchange->device_event()) request.done = std::move(event);
  if (--request.parts_left > 0) return;
  if (request.meta.tensors.empty()) return done_(part.request);  // a barrier
  TensorTraffic& traffic = traffic_[request.key.tensor()];
  if (traffic.kind != request.meta.kind || traffic.method != request.meta.method) {
    traffic.kind = request.meta.kind;
    traffic.method = request.meta.method;
    traffic.recent = {};
  }
  ++traffic.steps;
  ++traffic.recent.steps;
  traffic.sent += request.sent_bytes;
  traffic.recent.sent += request.sent_bytes;
  traffic.received += request.received_bytes;
  traffic.device += request.device_bytes;
  if (request.started != std::chrono::steady_clock::time_point()) {
    const auto now = wire_->Now();
    const double seconds = std::chrono::duration<double>(now - request.started).count();
    traffic.seconds += seconds;
    traffic.recent.seconds += seconds;
    const auto since_submit = [&](auto time) {
      return std::max(0.0, std::chrono::duration<double>(time - request.submitted).count());
    };
    if (request.negotiated && request.last_rank != ranks_[static_cast<size_t>(member_)]) {
      NoteLag(request, std::max(request.ready, request.submitted) - request.submitted);
    }
    if (since_submit(now) >= traffic.worst.seconds) {
      const double waited = request.last_rank < 0 ? 0.0 : since_submit(request.ready);
      traffic.worst = {traffic.steps, since_submit(now), waited, request.last_rank};
    }
  }
  if (!request.meta.method.none()) {
    traffic.effective = request.report.effective;
    traffic.captured = request.report.captured;
    const StepReport& report = request.report;
    request.result_value = (report.replan ? kWantsPlan : 0) | (report.too_large ? kTooLarge : 0);
    if (report.not_finite) {
      request.result_value |= kNotFinite | int64_t{report.not_finite_rank + 1} << kRankShift;
    }
  }
  if (request.meta.kind == OpKind::kAllReduce && request.device_bytes == 0) {
    for (const Contribution& tensor : request.request.tensors) {
      const int64_t bytes = tensor.uncompressed_bytes > 0
                                ? tensor.uncompressed_bytes
                                : static_cast<int64_t>(tensor.input.num_bytes());
      traffic.dense += 2 * (num_members_ - 1) * bytes / num_members_;
    }
  }
  done_(part.request);
}

std::vector<std::shared_ptr<RequestState>> Executor::Cancel(uint64_t id) {
  std::vector<std::shared_ptr<RequestState>> requests;
  auto found = running_.find(id);
  if (found == running_.end()) return requests;
  Batch& batch = *found->second;
  for (BatchPart& part : batch.parts) {
    part.exchange->Cancel();
    ++part.request->leaving;
    requests.push_back(part.request);
  }
  // The bytes are not needed any more, but may still be in flight.
  batch.taken_back = true;
  Leave(batch);
  return requests;
}

bool Executor::Carries(const std::shared_ptr<RequestState>& request) const {
  for (const auto& [id, batch] : running_) {
    if (batch->taken_back) continue;
    for (const BatchPart& part : batch->parts) {
      if (part.request == request) return true;
    }
  }
  return false;
}

size_t Executor::num_unread() const {
  size_t count = 0;
  for (const auto& [id, messages] : early_) count += messages.size();
  return count;
}

std::set<int> Executor::EarlyMembers(uint64_t id) const {
  std::set<int> members;
  const auto found = early_.find(id);
  if (found == early_.end()) return members;
  for (const Early& message : found->second) members.insert(message.member);
  return members;
}

void Executor::RetireSchedule(uint32_t schedule) {
  retired_schedule_ = schedule;
  std::erase_if(early_, [&](const auto& entry) { return IsRetired(entry.first); });
}

// Other ranks may have built the next schedule already.
bool Executor::IsRetired(uint64_t id) const {
  return retired_schedule_.has_value() && IsOfScheduleUpTo(id, *retired_schedule_);
}

std::vector<bool> Executor::Awaited() const {
  std::vector<bool> awaited(num_members_, false);
  for (const auto& [id, batch] : running_) {
    // Bytes that do not leave or arrive may be blocked by a peer, too; which one is not known here.
    const bool in_use = batch->finished && (batch->writing > 0 || !batch->pin.expired());
    if (batch->finished && !in_use) continue;
    for (int m = 0; m < num_members_; ++m) {
      if (m != member_ && (in_use || !batch->shares[batch->round][m].arrived)) awaited[m] = true;
    }
  }
  return awaited;
}

void Executor::Describe(Snapshot& snapshot) const {
  for (const auto& [id, batch] : running_) {
    if (batch->finished) continue;
    Snapshot::Open& open = snapshot.batches.emplace_back();
    for (const BatchPart& part : batch->parts) {
      if (!part.request) continue;
      open.what =
          std::string(Name(part.request->meta.kind)) + " \"" + part.request->meta.name + "\"";
      break;
    }
    if (batch->parts.size() > 1) {
      open.what += " and " + std::to_string(batch->parts.size() - 1) + " more";
    }
    open.seconds = std::chrono::duration<double>(wire_->Now() - batch->round_started).count();
    open.round = batch->round;
    open.num_rounds = batch->num_rounds;
    for (int m = 0; m < num_members_; ++m) {
      if (m == member_ || batch->shares[batch->round][m].arrived) continue;
      open.waits_for.push_back(ranks_[static_cast<size_t>(m)]);
    }
  }
}

std::vector<Executor::Late> Executor::LateSince(std::chrono::steady_clock::time_point since) const {
  std::vector<Late> late;
  for (const auto& [id, batch] : running_) {
    if (batch->finished || batch->round_started > since) continue;
    std::vector<int> members;
    for (int m = 0; m < num_members_; ++m) {
      if (m != member_ && !batch->shares[batch->round][m].arrived) members.push_back(m);
    }
    for (const BatchPart& part : batch->parts) {
      if (part.request) late.push_back({part.request, members, batch->round});
    }
  }
  return late;
}

}  // namespace dad
