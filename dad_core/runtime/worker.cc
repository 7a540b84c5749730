#include "runtime/worker.h"

#include <algorithm>
#include <numeric>

#include "dad/overflows.h"
#include "util/buffer_pool.h"
#include "util/byte_io.h"
#include "util/log.h"

namespace dad {
namespace {

// Pause between two checks of copies from a device.
constexpr std::chrono::microseconds kStagingLook{100};

Status ShutDown() { return Status::Aborted("the engine has been shut down"); }

}  // namespace

// How a lane sends: adds the lane's number and translates members to ranks.
class Worker::LaneWire final : public WireOut {
 public:
  LaneWire(Worker* worker, int lane, std::vector<int> ranks)
      : worker_(worker), lane_(static_cast<uint16_t>(lane)), ranks_(std::move(ranks)) {}

  void Send(int member, MessageHeader header, GatherBuffer payload,
            std::shared_ptr<void> keep) override {
    header.lane = lane_;
    if (header.kind == MessageKind::kData) {
      worker_->payload_sent_ += static_cast<int64_t>(payload.size());
    }
    worker_->transport_->Send(RankOf(member), header, std::move(payload), std::move(keep));
  }
  void OfferMemory(int member, uint64_t batch, int round, std::span<std::byte> memory) override {
    worker_->receive_table_.Offer(RankOf(member), lane_, batch, round, memory);
  }
  bool TakeBackMemory(int member, uint64_t batch, int round) override {
    return worker_->receive_table_.TakeBack(RankOf(member), lane_, batch, round);
  }
  std::shared_ptr<SendPin> MakePin(uint64_t batch) override {
    return std::make_shared<SendPin>(worker_->inbox_, lane_, batch);
  }
  void Fatal(int member, const std::string& why) override { worker_->Abort(RankOf(member), why); }
  Timeline* timeline() override { return &worker_->timeline_; }
  Clock::time_point Now() const override { return Clock::now(); }
  double LineRate() const override { return worker_->transport_->LineRate(); }
  void RunOnDevice(DeviceTask task) override { worker_->RunOnDevice(lane_, std::move(task)); }

 private:
  int RankOf(int member) const { return ranks_[static_cast<size_t>(member)]; }

  Worker* const worker_;
  const uint16_t lane_;
  const std::vector<int> ranks_;
};

Worker::Worker(std::unique_ptr<Transport> transport, std::string hostname, const Options& options,
               CpuLevel cpu_level, std::vector<std::vector<int>> process_sets,
               std::string why_staged, DeviceMethods device_methods)
    : transport_(std::move(transport)),
      hostname_(std::move(hostname)),
      options_(options),
      cpu_level_(cpu_level),
      timeline_(transport_->rank()),
      why_staged_(std::move(why_staged)),
      device_methods_(std::move(device_methods)),
      peers_(transport_->rank(), transport_->size(),
             std::chrono::duration<double>(options.timeout_seconds)),
      inquiry_(transport_->rank(), inbox_, this),
      stall_watch_(transport_->rank(), options,
                   [this](const std::vector<int>& ranks, Inquiry::Done done) {
                     inquiry_.Ask(ranks, std::move(done), Clock::now());
                   }) {
  std::vector<int> everybody(static_cast<size_t>(transport_->size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  MakeLane(0, everybody);
  for (const std::vector<int>& ranks : process_sets) MakeLane(next_process_set_++, ranks);
  thread_ = std::thread([this] { Run(); });
  transport_->SetSink(this);
}

Worker::~Worker() {
  inbox_->Post(ShutdownEvent{});
  thread_.join();
  transport_->SetSink(nullptr);
  BufferPool::OfProcess().Trim();
}

std::vector<int> Worker::ProcessSetRanks(int id) const {
  std::lock_guard lock(shared_mutex_);
  auto found = process_sets_.find(id);
  return found == process_sets_.end() ? std::vector<int>() : found->second;
}

std::vector<int> Worker::ProcessSetIds() const {
  std::lock_guard lock(shared_mutex_);
  std::vector<int> ids;
  for (const auto& [id, ranks] : process_sets_) {
    if (!hidden_sets_.contains(id)) ids.push_back(id);
  }
  return ids;
}

Status Worker::health() const {
  std::lock_guard lock(shared_mutex_);
  return health_;
}

void Worker::Run() {
  std::vector<Event> events;
  for (;;) {
    inbox_->Take(NextDeadline(), events);
    for (Event& event : events) Handle(event);
    if (!aborted_ && !shutting_down_) {
      if (stager_.busy()) TakeStaged();
      SendHeld();
      PumpLanes();
    }
    DropRemoved();
    const Clock::time_point now = Clock::now();
    CheckTimers(now);
    if (abort_wanted_ && !aborted_) DoAbort();
    if (shutting_down_ && ShutdownDone(now)) break;
  }
  // Before the connections close: members of a group leave it together.
  for (auto& [id, slot] : lanes_) slot.device.reset();
  // Before the requests end: until then messages in flight use their memory.
  transport_->Close();
  FailAll(ShutDown());
  // Requests that were posted while we left are answered, too, and so is what results from that.
  do {
    inbox_->Take(Clock::now(), events);
    for (Event& event : events) Handle(event);
  } while (!events.empty());
}

void Worker::PumpLanes() {
  do {
    for (auto& [id, slot] : lanes_) slot.lane->Pump();
  } while (FindLane(0)->HasSettled());
  const Status& closed = FindLane(0)->closed();
  if (join_ && !closed.ok()) {
    NoteBroken(closed);
    std::exchange(join_, nullptr)->Complete(closed);
  }
}

void Worker::NoteBroken(const Status& why) {
  std::lock_guard lock(shared_mutex_);
  if (health_.ok()) health_ = why;
}

void Worker::DropRemoved() {
  std::erase_if(removed_, [this](int id) {
    const bool unused = !FindLane(id)->executor().busy();
    if (unused) lanes_.erase(id);
    return unused;
  });
}

void Worker::Handle(Event& event) {
  if (auto* submit = std::get_if<SubmitEvent>(&event)) {
    HandleSubmit(submit->request);
  } else if (auto* all = std::get_if<SubmitAllEvent>(&event)) {
    for (const auto& request : all->requests) HandleSubmit(request);
  } else if (auto* waiting = std::get_if<WaitingEvent>(&event)) {
    (waiting->polls ? waiting->request->polled : waiting->request->waited_for) = true;
  } else if (auto* message = std::get_if<MessageEvent>(&event)) {
    HandleMessage(*message);
  } else if (auto* lost = std::get_if<PeerLostEvent>(&event)) {
    if (peers_.Alive(lost->peer)) Abort(lost->peer, lost->why.message());
  } else if (auto* sent = std::get_if<SentEvent>(&event)) {
    if (Lane* lane = FindLane(sent->lane)) lane->OnSent(sent->batch);
  } else if (auto* call = std::get_if<CallEvent>(&event)) {
    call->call();
  } else if (!shutting_down_) {
    BeginShutdown();
  }
}

void Worker::HandleSubmit(const std::shared_ptr<RequestState>& request) {
  if (aborted_) return request->Complete(health());
  last_submitted_ = request->meta.name;
  last_kind_ = request->meta.kind;
  last_submit_ = request->submitted;
  if (shutting_down_) return request->Complete(ShutDown());
  if (request->meta.kind == OpKind::kJoin) {
    if (!stager_.busy()) return HandleJoin(request);
    // Requests submitted before it are handled before it.
    if (!join_after_staging_) {
      join_after_staging_ = request;
      return;
    }
    return request->Complete(Status::InvalidArgument("join: this rank has joined already"));
  }
  Lane* lane = FindLane(request->request.process_set);
  if (lane == nullptr) {
    return request->Complete(Status::InvalidArgument(
        "\"" + request->meta.name + "\": process set " +
        std::to_string(request->request.process_set) + " does not exist or does not contain rank " +
        std::to_string(transport_->rank())));
  }
  if (request->device_index >= 0) return SubmitFromDevice(*lane, request);
  lane->Submit(request);
}

void Worker::HandleJoin(const std::shared_ptr<RequestState>& request) {
  if (join_) {
    return request->Complete(Status::InvalidArgument("join: this rank has joined already"));
  }
  if (const Status& closed = FindLane(0)->closed(); !closed.ok()) {
    NoteBroken(closed);
    return request->Complete(closed);
  }
  join_ = request;
  for (auto& [id, slot] : lanes_) slot.lane->SetJoined(true);
}

bool Worker::HasOpenInSets() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
    return lane.first != 0 && lane.second.lane->has_open();
  });
}

void Worker::AllJoined(int last_rank) {
  ++num_joins_;
  for (auto& [id, slot] : lanes_) slot.lane->SetJoined(false);
  join_->result_value = last_rank;
  std::exchange(join_, nullptr)->Complete(Status::Ok());
}

void Worker::HandleMessage(MessageEvent& message) {
  const MessageHeader& header = message.header;
  peers_.Heard(message.peer, Clock::now());
  switch (header.kind) {
    case MessageKind::kNegotiate:
    case MessageKind::kLeft:
    case MessageKind::kData: {
      if (aborted_ || shutting_down_) return;
      if (Lane* lane = FindLane(header.lane)) return HandleInLane(*lane, message);
      // Either a peer agreed on a new process set before this rank, or the set is gone.
      if (header.lane >= next_process_set_) KeepForLater(message);
      return;
    }
    case MessageKind::kPing: return SendControl(message.peer, MessageKind::kPong);
    case MessageKind::kPong: return;
    case MessageKind::kGoodbye: return PeerSaidGoodbye(message.peer);
    case MessageKind::kAbort: {
      ByteReader in(message.payload.span());
      const int culprit = in.Value<int32_t>();
      const std::string why = in.Text();
      abort_heard_ = true;
      return Abort(culprit, why);
    }
    case MessageKind::kAsk: return inquiry_.OnAsk(message.peer, header.batch, Clock::now());
    case MessageKind::kState: {
      return inquiry_.OnState(message.peer, header.batch, message.payload.span());
    }
    case MessageKind::kCollective: return;  // never gets here: the transport keeps these
  }
}

void Worker::HandleInLane(Lane& lane, MessageEvent& message) {
  const int member = lane.MemberOf(message.peer);
  if (member < 0) return Abort(message.peer, "sent a message to a process set it is not in");
  lane.OnMessage(member, message.header, std::move(message.payload));
}

// A peer can go no further than its first message to a process set before all members answer.
void Worker::KeepForLater(MessageEvent& message) {
  std::vector<MessageEvent>& early = unborn_[message.header.lane];
  const auto from_peer = [&](const MessageEvent& kept) { return kept.peer == message.peer; };
  if (std::any_of(early.begin(), early.end(), from_peer)) {
    return Abort(message.peer, "sent several messages to a process set that does not exist yet");
  }
  early.push_back(std::move(message));
}

void Worker::PeerSaidGoodbye(int peer) {
  if (!peers_.Alive(peer)) return;
  if (!shutting_down_) SendControl(peer, MessageKind::kGoodbye);
  peers_.Set(peer, Peers::State::kGone);
  const Status why = Status::Aborted("rank " + std::to_string(peer) +
                                     " has shut down or ended, and its part in this collective "
                                     "is missing: its output says why. If it ended without an "
                                     "error, it had fewer steps than this rank: give all ranks "
                                     "equally many batches, or call join() after the last one");
  for (auto& [id, slot] : lanes_) {
    const int member = slot.lane->MemberOf(peer);
    if (member >= 0) slot.lane->MemberGone(member, why);
  }
}

void Worker::SendControl(int peer, MessageKind kind, ByteSpan payload) {
  MessageHeader header;
  header.kind = kind;
  GatherBuffer bytes;
  bytes.Append(payload);
  transport_->Send(peer, header, std::move(bytes), nullptr);
}

void Worker::CheckTimers(Clock::time_point now) {
  timeline_.FlushIfDue(now);
  inquiry_.Check(now);
  if (aborted_ || shutting_down_) return;
  if (now >= next_peer_check_) {
    const Peers::Verdict verdict = peers_.Check(Awaited(), Progress(), now);
    for (int peer : verdict.ping) SendControl(peer, MessageKind::kPing);
    if (verdict.silent.has_value()) {
      Abort(*verdict.silent, "gave no sign of life for " +
                                 std::to_string(static_cast<int64_t>(peers_.timeout().count())) +
                                 " s (DAD_TIMEOUT_SECONDS): it hangs, was stopped, or its host "
                                 "is gone");
    }
    next_peer_check_ = now + peers_.interval();
  }
  if (stall_watch_.enabled() && now >= next_stall_check_) {
    for (auto& [id, slot] : lanes_) {
      if (auto reason = stall_watch_.Check(*slot.lane, now)) Abort(-1, *reason);
    }
    next_stall_check_ = now + stall_watch_.interval();
  }
}

std::optional<Worker::Clock::time_point> Worker::NextDeadline() {
  if (shutting_down_) return shutdown_deadline_;
  std::optional<Clock::time_point> deadline = timeline_.NextFlush();
  auto sooner = [&](Clock::time_point at) {
    if (!deadline.has_value() || at < *deadline) deadline = at;
  };
  if (const auto at = inquiry_.NextDeadline()) sooner(*at);
  if (aborted_) return deadline;
  bool waiting = false;
  bool held = false;
  for (const auto& [id, slot] : lanes_) {
    held = held || slot.lane->executor().holds();
    if (auto at = slot.lane->NextDeadline()) sooner(*at);
    waiting = waiting || slot.lane->busy() || (slot.device && slot.device->busy());
  }
  if (stager_.busy() || held) sooner(Clock::now() + kStagingLook);
  // An idle engine has no timer, unless its trace is not written yet.
  if (waiting) {
    sooner(next_peer_check_);
    if (stall_watch_.enabled()) sooner(next_stall_check_);
  }
  return deadline;
}

std::vector<bool> Worker::Awaited() const {
  std::vector<bool> awaited(static_cast<size_t>(transport_->size()), false);
  for (const auto& [id, slot] : lanes_) {
    std::vector<bool> members = slot.lane->Awaited();
    // A device that waits for others cannot tell for which rank.
    if (slot.device && slot.device->busy()) members.assign(members.size(), true);
    for (size_t m = 0; m < members.size(); ++m) {
      if (members[m]) awaited[static_cast<size_t>(slot.lane->ranks()[m])] = true;
    }
  }
  if (join_) std::fill(awaited.begin(), awaited.end(), true);
  return awaited;
}

std::vector<int64_t> Worker::Progress() const {
  std::vector<int64_t> progress(static_cast<size_t>(transport_->size()));
  for (int peer = 0; peer < transport_->size(); ++peer) {
    progress[static_cast<size_t>(peer)] = transport_->ProgressWith(peer);
  }
  return progress;
}

void Worker::MakeLane(int id, const std::vector<int>& ranks) {
  {
    std::lock_guard lock(shared_mutex_);
    process_sets_[id] = ranks;
  }
  if (std::find(ranks.begin(), ranks.end(), transport_->rank()) == ranks.end()) return;
  LaneSlot slot;
  slot.wire = std::make_unique<LaneWire>(this, id, ranks);
  slot.next_turn = std::make_unique<uint64_t>(0);
  ExchangeEnv env;
  env.process_set = id;
  env.direct_bytes = options_.direct_bytes;
  env.cpu_level = cpu_level_;
  env.states = &states_;
  env.threads = static_cast<int>(options_.threads);
  env.device_collectives = transport_->device_collectives() != nullptr && ranks.size() > 1;
  env.next_turn = slot.next_turn.get();
  env.ring_bytes = RingBytes(options_.ring_bytes, ranks.size());
  env.pack = options_.pack > 0;
  if (ranks.size() > 1) {
    env.bench = device_methods_.bench;
    env.device_products = device_methods_.products;
  }
  slot.lane = std::make_unique<Lane>(id, ranks, transport_->rank(), options_, env, slot.wire.get(),
                                     static_cast<LaneOwner*>(this));
  lanes_[id] = std::move(slot);
}

Lane* Worker::FindLane(int id) {
  auto found = lanes_.find(id);
  return found == lanes_.end() ? nullptr : found->second.lane.get();
}

void Worker::Completed(const std::shared_ptr<RequestState>& request) {
  timeline_.Finished(*request);
  last_result_ = Clock::now();
  if (request->first_error.code() == StatusCode::kAborted) NoteBroken(request->first_error);
  if (request->report.suspect >= 0) WarnOfSuspect(*request);
  if (request->staged && request->first_error.ok()) request->first_error = stager_.Return(*request);
  request->Complete(request->first_error);
}

// Only for gradients: in a user's own sums it may be intended.
void Worker::WarnOfSuspect(const RequestState& request) {
  const int process_set = request.request.process_set;
  const Lane* lane = FindLane(process_set);
  if (lane == nullptr || request.meta.stream == 0 || OverflowsAreExpected()) return;
  if (!warned_streams_.emplace(process_set, request.meta.stream).second) return;
  const int rank = lane->ranks()[static_cast<size_t>(request.report.suspect)];
  DAD_LOG(Warning) << "the gradient of \"" << request.meta.name << "\" has NaN or infinities on "
                   << (request.request.sums_of_hosts ? "the host of rank " : "rank ") << rank
                   << ", so all ranks get them in its sum; this is said once per optimizer";
}

void Worker::ProcessSetDecided(const RequestMeta& meta, const std::shared_ptr<RequestState>& mine) {
  Status status;
  int64_t value = -1;
  if (meta.kind == OpKind::kAddProcessSet) {
    std::vector<int> ranks = meta.ranks;
    std::sort(ranks.begin(), ranks.end());
    {
      std::lock_guard lock(shared_mutex_);
      const bool hidden = meta.name.starts_with(kHiddenSet);
      if (hidden) hidden_sets_.insert(next_process_set_);
      for (const auto& [id, existing] : process_sets_) {
        if (existing != ranks || hidden || hidden_sets_.contains(id)) continue;
        status = Status::InvalidArgument("a process set of ranks " +
                                         ToString(Shape(ranks.begin(), ranks.end())) +
                                         " exists already (" + std::to_string(id) + ")");
      }
    }
    if (status.ok()) {
      const int id = next_process_set_++;
      value = id;
      MakeLane(id, ranks);
      if (Lane* lane = FindLane(id)) {
        if (join_) lane->SetJoined(true);
        for (MessageEvent& early : unborn_[id]) HandleInLane(*lane, early);
      }
      unborn_.erase(id);
    }
  } else {
    const int id = meta.ranks[0];
    {
      std::lock_guard lock(shared_mutex_);
      if (process_sets_.erase(id) == 0) {
        status = Status::InvalidArgument("there is no process set " + std::to_string(id));
      }
    }
    if (Lane* lane = status.ok() ? FindLane(id) : nullptr) {
      lane->Remove(
          Status::InvalidArgument("process set " + std::to_string(id) + " has been removed"));
      removed_.push_back(id);  // deferred: it may be the caller
    }
  }
  if (mine) {
    mine->result_value = value;
    mine->Complete(status);
  }
}

void Worker::GiveUp(uint64_t step, const Status& why) {
  inbox_->Post(CallEvent{[this, step, why] {
    for (auto& [id, slot] : lanes_) slot.lane->GiveUp(step, why);
  }});
}

}  // namespace dad
