// Ranks without threads, sockets or time: their lanes, a fake network between them and a clock
// that only the test moves. The test decides what happens next, one step at a time, so that every
// order of events that TCP allows can be produced and repeated.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "exchange/feedback/state_store.h"
#include "runtime/execute/receive_table.h"
#include "runtime/lane/lane.h"
#include "runtime/observe/timeline.h"
#include "tests/cpp/engine/engine_fixture.h"
#include "util/byte_io.h"

namespace dad {

// The status of a request that has finished.
inline Status StatusOf(RequestState& request) {
  EXPECT_TRUE(request.finished()) << request.meta.name;
  Status status = Status::Internal("not finished");
  if (request.finished()) request.OnDone([&](const Status& s) { status = s; });
  return status;
}

// Messages between ranks. Those from one rank to another keep their order, but control messages may
// overtake the others (wire/message.h). A message takes three steps: its bytes leave the sender's
// memory, the receiver picks the memory that they go to, and it is delivered.
class FakeNetwork {
 public:
  struct Message {
    MessageHeader header;
    GatherBuffer payload;
    std::shared_ptr<void> keep;
    bool is_end = false;  // no message: the connection breaks here

    bool sent = false;
    bool reserved = false;
    AlignedBuffer bytes;
    std::byte* memory = nullptr;  // of the receiver
  };
  using Line = std::deque<Message>;

  Line& line(int from, int to) { return lines_[{from, to}]; }

  void Send(int from, int to, MessageHeader header, GatherBuffer payload,
            std::shared_ptr<void> keep) {
    header.payload_bytes = payload.size();
    Message message;
    message.header = header;
    message.payload = std::move(payload);
    message.keep = std::move(keep);
    line(from, to).push_back(std::move(message));
  }

  static void Leave(Message& message) {
    message.bytes = AlignedBuffer(message.payload.size());
    std::byte* to = message.bytes.data();
    for (ByteSpan piece : message.payload.Pieces()) {
      if (!piece.empty()) to = std::copy(piece.begin(), piece.end(), to);
    }
    message.payload = GatherBuffer();
    message.keep.reset();
    message.sent = true;
  }

 private:
  std::map<std::pair<int, int>, Line> lines_;
};

class FakeCluster;

// A rank: its lanes, and what the engine's worker does for them.
class FakeRank final : private LaneOwner {
 public:
  using Clock = std::chrono::steady_clock;

  FakeRank(FakeCluster* cluster, int rank);

  // What users do. A lane hears of it in the next Run().
  std::shared_ptr<RequestState> Submit(Request request);
  std::shared_ptr<RequestState> Join() { return Submit(Bare(OpKind::kJoin, "join")); }
  void Wait(const std::shared_ptr<RequestState>& request);  // does not block
  void Poll(const std::shared_ptr<RequestState>& request);
  void GiveUp(uint64_t step, const Status& why);
  void Leave();  // shuts down

  // One round of the worker: takes what has happened since the last one, then pumps.
  void Run();

  Lane& lane(int id = 0) { return *lanes_.at(id).lane; }
  bool alive() const { return state_ == State::kAlive; }
  bool ended() const { return state_ == State::kClosed; }
  const std::string& fatal() const { return fatal_; }  // why this rank aborted

  // Called by the network.
  void Post(Event event);
  std::byte* Reserve(int peer, const MessageHeader& header) {
    return receive_table_.Take(peer, header);
  }
  bool has_events() const { return has_events_; }
  void WakeUp() { has_events_ = true; }
  void Close(const Status& why);  // as when the process is killed, or has aborted or shut down

 private:
  class Wire;
  struct Slot {
    std::unique_ptr<Wire> wire;
    std::unique_ptr<Lane> lane;
  };
  enum class State { kAlive, kLeaving, kClosed };

  void Handle(Event& event);
  void HandleSubmit(const std::shared_ptr<RequestState>& request);
  void HandleMessage(MessageEvent& message);
  void HandleGoodbye(int peer);
  void Control(int peer, MessageKind kind, ByteSpan payload = {});
  void Abort(int culprit, const std::string& why);

  void Completed(const std::shared_ptr<RequestState>& request) override;
  void ProcessSetDecided(const RequestMeta&, const std::shared_ptr<RequestState>&) override {
    ADD_FAILURE() << "no test here makes process sets";
  }
  void AllJoined(int last_rank) override;
  uint32_t num_joins() const override { return num_joins_; }
  bool HasOpenInSets() const override {
    return std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
      return lane.first != 0 && lane.second.lane->has_open();
    });
  }

  FakeCluster* const cluster_;
  const int rank_;
  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  const std::shared_ptr<PhaseCounter> phases_ = std::make_shared<PhaseCounter>();
  bool has_events_ = false;
  ReceiveTable receive_table_;
  StateStore states_;
  Timeline timeline_;
  std::map<int, Slot> lanes_;
  std::shared_ptr<RequestState> join_;
  uint32_t num_joins_ = 0;
  State state_ = State::kAlive;
  std::vector<bool> peer_alive_;
  bool abort_wanted_ = false;
  std::string abort_reason_;
  int culprit_ = -1;
  bool abort_heard_ = false;
  std::string fatal_;
};

class FakeCluster {
 public:
  using Clock = std::chrono::steady_clock;
  // Which of so many possible steps is next.
  using Choose = std::function<size_t(size_t num_steps)>;

  // Process set 0 has all ranks; 1, 2, … are `sets`.
  explicit FakeCluster(int size, Options options = {}, std::vector<std::vector<int>> sets = {})
      : options_(std::move(options)), sets_(std::move(sets)) {
    std::vector<int> everybody(static_cast<size_t>(size));
    std::iota(everybody.begin(), everybody.end(), 0);
    sets_.insert(sets_.begin(), everybody);
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<FakeRank>(this, rank));
    }
  }

  int size() const { return static_cast<int>(sets_[0].size()); }
  FakeRank& operator[](int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  FakeNetwork& network() { return network_; }
  const Options& options() const { return options_; }
  const std::vector<std::vector<int>>& sets() const { return sets_; }

  Clock::time_point now() const { return now_; }
  void Advance(Clock::duration time) {
    now_ += time;
    for (auto& rank : ranks_) rank->WakeUp();
  }

  // Takes one step that is possible: a rank runs, or a message gets further. False if there is
  // none.
  bool Step(const Choose& choose) {
    struct Possible {
      int from;
      int to;  // -1: no message, the rank `from` runs
    };
    std::vector<Possible> possible;
    for (int rank = 0; rank < size(); ++rank) {
      if ((*this)[rank].has_events()) possible.push_back({rank, -1});
    }
    for (int from = 0; from < size(); ++from) {
      for (int to = 0; to < size(); ++to) {
        if (!network_.line(from, to).empty()) possible.push_back({from, to});
      }
    }
    if (possible.empty()) return false;
    const Possible next = possible[choose(possible.size())];
    if (next.to < 0) {
      (*this)[next.from].Run();
    } else {
      MoveMessage(next.from, next.to, choose);
    }
    return true;
  }

  // Steps until nothing is left to do but to wait.
  void Settle(const Choose& choose = [](size_t) { return size_t{0}; }) {
    while (Step(choose)) {
    }
  }

  // The clock goes on to the next time that a lane waits for. False if none does.
  bool AdvanceToDeadline() {
    std::optional<Clock::time_point> next;
    for (auto& rank : ranks_) {
      for (size_t id = 0; rank->alive() && id < sets_.size(); ++id) {
        if (!IsMember(static_cast<int>(id), *rank)) continue;
        const auto deadline = rank->lane(static_cast<int>(id)).NextDeadline();
        if (deadline.has_value() && (!next.has_value() || *deadline < *next)) next = deadline;
      }
    }
    if (!next.has_value()) return false;
    Advance(std::max(*next - now_, Clock::duration(1)));
    return true;
  }

  // The process ends without a word. Messages that have not left are lost, and so are some of
  // those that have: `choose` says how many of each line arrive.
  void Kill(
      int rank, const Choose& choose = [](size_t) { return size_t{0}; }) {
    (*this)[rank].Close(Status::Aborted("killed"));
    for (int to = 0; to < size(); ++to) {
      FakeNetwork::Line& line = network_.line(rank, to);
      const size_t sent = static_cast<size_t>(std::count_if(
          line.begin(), line.end(), [](const auto& message) { return message.sent; }));
      line.resize(choose(sent + 1));
      Break(rank, to);
      network_.line(to, rank).clear();
      (*this)[to].WakeUp();  // pins of the messages
    }
  }

  // No more messages from `from` to `to` than those that are on their way.
  void Break(int from, int to) {
    if (from == to) return;
    for (auto& message : network_.line(from, to)) {
      if (!message.sent && !message.is_end) FakeNetwork::Leave(message);
    }
    FakeNetwork::Message end;
    end.is_end = true;
    network_.line(from, to).push_back(std::move(end));
  }

  // Told of every request that a lane has finished, when it has.
  std::function<void(RequestState&)> on_completed = [](RequestState&) {};

 private:
  bool IsMember(int set, FakeRank& rank) const {
    const std::vector<int>& members = sets_[static_cast<size_t>(set)];
    return std::any_of(members.begin(), members.end(), [&](int member) {
      return ranks_[static_cast<size_t>(member)].get() == &rank;
    });
  }

  void MoveMessage(int from, int to, const Choose& choose) {
    FakeNetwork::Line& line = network_.line(from, to);
    if ((*this)[to].ended()) {
      line.clear();
      (*this)[from].WakeUp();  // pins of the messages
      return;
    }
    const auto unsent = std::find_if(line.begin(), line.end(), [](const auto& message) {
      return !message.sent && !message.is_end;
    });
    const auto control = std::find_if(line.begin(), line.end(), [](const auto& message) {
      return !message.is_end && IsControl(message.header);
    });
    if (control != line.begin() && control != line.end() && choose(2) == 1) {
      FakeNetwork::Message message = std::move(*control);
      line.erase(control);
      if (!message.sent) FakeNetwork::Leave(message);
      (*this)[from].WakeUp();
      (*this)[to].Post(MessageEvent{from, message.header, std::move(message.bytes)});
      return;
    }
    FakeNetwork::Message& first = line.front();
    const bool can_send = unsent != line.end();
    const bool can_deliver = first.sent || first.is_end;
    if (can_send && (!can_deliver || choose(2) == 1)) {
      FakeNetwork::Leave(*unsent);
      (*this)[from].WakeUp();
    } else if (first.is_end) {
      line.clear();
      (*this)[to].Post(PeerLostEvent{from, Status::Aborted("connection lost")});
    } else if (!first.reserved) {
      first.reserved = true;
      first.memory = (*this)[to].Reserve(from, first.header);
    } else {
      FakeNetwork::Message message = std::move(first);
      line.pop_front();
      if (message.memory != nullptr) {
        std::copy(message.bytes.span().begin(), message.bytes.span().end(), message.memory);
        message.bytes = AlignedBuffer();
      }
      (*this)[to].Post(MessageEvent{from, message.header, std::move(message.bytes)});
    }
  }

  const Options options_;
  std::vector<std::vector<int>> sets_;
  Clock::time_point now_ = Clock::time_point() + std::chrono::hours(1);
  FakeNetwork network_;
  std::vector<std::unique_ptr<FakeRank>> ranks_;
};

class FakeRank::Wire final : public WireOut {
 public:
  Wire(FakeRank* rank, int lane, std::vector<int> ranks)
      : rank_(rank), lane_(static_cast<uint16_t>(lane)), ranks_(std::move(ranks)) {}

  void Send(int member, MessageHeader header, GatherBuffer payload,
            std::shared_ptr<void> keep) override {
    header.lane = lane_;
    rank_->cluster_->network().Send(rank_->rank_, RankOf(member), header, std::move(payload),
                                    std::move(keep));
  }
  void OfferMemory(int member, uint64_t batch, int round, std::span<std::byte> memory) override {
    rank_->receive_table_.Offer(RankOf(member), lane_, batch, round, memory);
  }
  bool TakeBackMemory(int member, uint64_t batch, int round) override {
    return rank_->receive_table_.TakeBack(RankOf(member), lane_, batch, round);
  }
  std::shared_ptr<SendPin> MakePin(uint64_t batch) override {
    return std::make_shared<SendPin>(rank_->inbox_, lane_, batch);
  }
  void RunOnDevice(DeviceTask) override { ADD_FAILURE() << "there is no device here"; }
  void Fatal(int member, const std::string& why) override { rank_->Abort(RankOf(member), why); }
  Timeline* timeline() override { return &rank_->timeline_; }
  Clock::time_point Now() const override { return rank_->cluster_->now(); }
  double LineRate() const override { return 0; }

 private:
  int RankOf(int member) const { return ranks_[static_cast<size_t>(member)]; }

  FakeRank* const rank_;
  const uint16_t lane_;
  const std::vector<int> ranks_;
};

inline FakeRank::FakeRank(FakeCluster* cluster, int rank)
    : cluster_(cluster),
      rank_(rank),
      timeline_(rank),
      peer_alive_(static_cast<size_t>(cluster->size()), true) {
  const Options& options = cluster->options();
  for (size_t id = 0; id < cluster->sets().size(); ++id) {
    const std::vector<int>& ranks = cluster->sets()[id];
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
    ExchangeEnv env;
    env.process_set = static_cast<int>(id);
    env.direct_bytes = options.direct_bytes;
    env.states = &states_;
    env.ring_bytes = RingBytes(options.ring_bytes, ranks.size());
    env.pack = options.pack > 0;
    Slot& slot = lanes_[static_cast<int>(id)];
    slot.wire = std::make_unique<Wire>(this, static_cast<int>(id), ranks);
    slot.lane = std::make_unique<Lane>(static_cast<int>(id), ranks, rank, options, env,
                                       slot.wire.get(), static_cast<LaneOwner*>(this));
  }
}

inline void FakeRank::Post(Event event) {
  inbox_->Post(std::move(event));
  has_events_ = true;
}

inline std::shared_ptr<RequestState> FakeRank::Submit(Request request) {
  auto state = std::make_shared<RequestState>(std::move(request), inbox_, phases_, cluster_->now());
  Post(SubmitEvent{state});
  return state;
}

inline void FakeRank::Wait(const std::shared_ptr<RequestState>& request) {
  phases_->UserWaits();
  Post(WaitingEvent{request});
}

inline void FakeRank::Poll(const std::shared_ptr<RequestState>& request) {
  Post(WaitingEvent{request, /*polls=*/true});
}

inline void FakeRank::GiveUp(uint64_t step, const Status& why) {
  Post(CallEvent{[this, step, why] {
    for (auto& [id, slot] : lanes_) slot.lane->GiveUp(step, why);
  }});
}

inline void FakeRank::Run() {
  has_events_ = false;
  std::vector<Event> events;
  inbox_->Take(Clock::time_point(), events);
  for (Event& event : events) Handle(event);
  if (state_ == State::kAlive) {
    do {
      for (auto& [id, slot] : lanes_) slot.lane->Pump();
    } while (lane().HasSettled());
    const Status& closed = lane().closed();
    if (join_ && !closed.ok()) std::exchange(join_, nullptr)->Complete(closed);
  }
  if (abort_wanted_ && state_ != State::kClosed) {
    fatal_ = "rank " + std::to_string(culprit_) + ": " + abort_reason_;
    ByteWriter out;
    out.Value(static_cast<int32_t>(culprit_));
    out.Text(abort_reason_);
    for (int peer = 0; !abort_heard_ && peer < cluster_->size(); ++peer) {
      if (peer != culprit_) Control(peer, MessageKind::kAbort, out.bytes());
    }
    for (int peer = 0; peer < cluster_->size(); ++peer) cluster_->Break(rank_, peer);
    Close(Status::Aborted(fatal_));
  }
  if (state_ == State::kLeaving &&
      std::find(peer_alive_.begin(), peer_alive_.end(), true) == peer_alive_.end()) {
    Close(Status::Aborted("the engine has been shut down"));
  }
}

inline void FakeRank::Handle(Event& event) {
  if (auto* submit = std::get_if<SubmitEvent>(&event)) {
    HandleSubmit(submit->request);
  } else if (auto* waiting = std::get_if<WaitingEvent>(&event)) {
    (waiting->polls ? waiting->request->polled : waiting->request->waited_for) = true;
  } else if (auto* message = std::get_if<MessageEvent>(&event)) {
    if (state_ != State::kClosed) HandleMessage(*message);
  } else if (auto* lost = std::get_if<PeerLostEvent>(&event)) {
    if (peer_alive_[static_cast<size_t>(lost->peer)]) Abort(lost->peer, lost->why.message());
  } else if (auto* sent = std::get_if<SentEvent>(&event)) {
    lane(sent->lane).OnSent(sent->batch);
  } else if (auto* call = std::get_if<CallEvent>(&event)) {
    call->call();
  }
}

inline void FakeRank::HandleSubmit(const std::shared_ptr<RequestState>& request) {
  if (state_ != State::kAlive) return request->Complete(Status::Aborted("closed: " + fatal_));
  if (request->meta.kind != OpKind::kJoin)
    return lane(request->request.process_set).Submit(request);
  if (!lane().closed().ok()) return request->Complete(lane().closed());
  join_ = request;
  for (auto& [id, slot] : lanes_) slot.lane->SetJoined(true);
}

inline void FakeRank::HandleMessage(MessageEvent& message) {
  switch (message.header.kind) {
    case MessageKind::kNegotiate:
    case MessageKind::kLeft:
    case MessageKind::kData: {
      if (state_ != State::kAlive) return;
      Lane& to = lane(message.header.lane);
      return to.OnMessage(to.MemberOf(message.peer), message.header, std::move(message.payload));
    }
    case MessageKind::kGoodbye: return HandleGoodbye(message.peer);
    case MessageKind::kAbort: {
      ByteReader in(message.payload.span());
      const int culprit = in.Value<int32_t>();
      abort_heard_ = true;
      return Abort(culprit, in.Text());
    }
    default: ADD_FAILURE() << "unexpected kind of message";
  }
}

inline void FakeRank::Leave() {
  state_ = State::kLeaving;
  peer_alive_[static_cast<size_t>(rank_)] = false;
  for (int peer = 0; peer < cluster_->size(); ++peer) Control(peer, MessageKind::kGoodbye);
  WakeUp();
}

inline void FakeRank::HandleGoodbye(int peer) {
  if (!peer_alive_[static_cast<size_t>(peer)]) return;
  if (state_ == State::kAlive) Control(peer, MessageKind::kGoodbye);
  peer_alive_[static_cast<size_t>(peer)] = false;
  const Status why = Status::Aborted("rank " + std::to_string(peer) + " has shut down");
  for (auto& [id, slot] : lanes_) {
    const int member = slot.lane->MemberOf(peer);
    if (member >= 0) slot.lane->MemberGone(member, why);
  }
}

inline void FakeRank::Control(int peer, MessageKind kind, ByteSpan payload) {
  if (!peer_alive_[static_cast<size_t>(peer)] || peer == rank_) return;
  MessageHeader header;
  header.kind = kind;
  GatherBuffer bytes;
  bytes.Append(payload);
  cluster_->network().Send(rank_, peer, header, std::move(bytes), nullptr);
}

inline void FakeRank::Abort(int culprit, const std::string& why) {
  if (abort_wanted_) return;
  abort_wanted_ = true;
  culprit_ = culprit;
  abort_reason_ = why;
}

inline void FakeRank::Close(const Status& why) {
  state_ = State::kClosed;
  receive_table_.Clear();
  for (auto& [id, slot] : lanes_) slot.lane->FailAll(why);
  if (join_) std::exchange(join_, nullptr)->Complete(why);
  WakeUp();  // what has been submitted meanwhile gets its answer
}

inline void FakeRank::Completed(const std::shared_ptr<RequestState>& request) {
  EXPECT_FALSE(request->finished()) << request->meta.name << " ends twice";
  request->Complete(request->first_error);
  cluster_->on_completed(*request);
}

inline void FakeRank::AllJoined(int last_rank) {
  ++num_joins_;
  for (auto& [id, slot] : lanes_) slot.lane->SetJoined(false);
  join_->result_value = last_rank;
  std::exchange(join_, nullptr)->Complete(Status::Ok());
}

}  // namespace dad
