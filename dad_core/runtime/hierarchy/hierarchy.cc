#include "dad/hierarchy.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>

#include "linalg/reduce.h"
#include "runtime/hierarchy/host_pieces.h"
#include "runtime/hierarchy/open_climbs.h"
#include "runtime/request_state.h"
#include "util/aligned_buffer.h"

namespace dad {

std::vector<int> HostPlan::Leaders() const {
  std::vector<int> leaders;
  for (const std::vector<int>& host : hosts) leaders.push_back(host.front());
  return leaders;
}

const std::vector<int>& HostPlan::HostOf(int rank) const {
  static const std::vector<int> kNone;
  for (const std::vector<int>& host : hosts) {
    if (std::find(host.begin(), host.end(), rank) != host.end()) return host;
  }
  return kNone;
}

HostPlan PlanHosts(std::span<const std::string> hostname_of_rank) {
  HostPlan plan;
  std::vector<std::string> names;
  for (size_t rank = 0; rank < hostname_of_rank.size(); ++rank) {
    const auto found = std::find(names.begin(), names.end(), hostname_of_rank[rank]);
    const auto host = static_cast<size_t>(found - names.begin());
    if (found == names.end()) {
      names.push_back(hostname_of_rank[rank]);
      plan.hosts.emplace_back();
    }
    plan.hosts[host].push_back(static_cast<int>(rank));
  }
  return plan;
}

// One request in flight: inside the host, between hosts, inside the host again. The thread that
// completes a step submits the next one; no thread waits in between.
//
// A rank that has joined contributes nothing to a step and needs nothing from it. If a leader has
// joined, it does not take the sum of its host to the other hosts: that sum is an orphan. The other
// ranks of the host notice this in the step inside the host, and the other leaders in the step
// between hosts. Then all remaining ranks exchange once more, and orphans are added to the result
// of the others. Orphans are sent without a method, since its state is kept by the leader. Nothing
// is lost, and Average still divides by the number of all ranks. A rank joins only when its own
// requests are done (WhenIdle), so that a rank with a request in flight is never taken for absent.
// Because of that last step, a failure has to be reported there, too.
class Hierarchy::Climb final : public Ticket, public std::enable_shared_from_this<Climb> {
 public:
  Climb(const Hierarchy& hierarchy, Request request, std::vector<HostPiece> pieces)
      : engine_(hierarchy.engine_),
        plan_(hierarchy.plan_),
        host_(hierarchy.host_),
        open_(hierarchy.open_),
        agreed_(hierarchy.agreed_),
        host_set_(hierarchy.host_set_),
        leader_set_(hierarchy.leader_set_),
        leads_(hierarchy.leads()),
        request_(std::move(request)),
        pieces_(std::move(pieces)) {}

  // The first request of a name meets ranks that would send it between all ranks on their own (an
  // allgather, or exact factors). Otherwise both sides would wait for ever, in sets of their own.
  void Start() {
    open_->Add(shared_from_this());
    if (!request_.recurring || agreed_->Has(request_.name)) return Up(nullptr);
    Request request;
    request.name = request_.name;
    request.op = request_.op;
    request.terms = TermsOf(request_);
    request.stream = request_.stream;
    request.step = request_.step;
    request.recurring = false;
    request.tensors.emplace_back();
    request.tensors[0].input.shape = request.tensors[0].output.shape = {0};
    Follow(std::move(request), &Climb::Agreed);
  }
  void Agreed(const Ticket*) {
    agreed_->Add(request_.name);
    Up(nullptr);
  }
  void Up(const Ticket*) {
    if (host_set_ < 0) return Across(nullptr);  // its own sum
    Follow(Inside(OpKind::kAllReduce, HostStep::kInside), &Climb::Across);
  }
  void Fail(const Status& why) { End(why); }

  bool Done() override {
    std::unique_lock lock(mutex_);
    if (ended_) return true;
    const std::shared_ptr<Ticket> step = step_;
    lock.unlock();
    if (step) (void)step->Done();  // somebody polls it, so the step should know
    return false;
  }

  Status Wait(std::chrono::milliseconds timeout) override {
    UserWaits();
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    Status late = Status::Timeout("\"" + request_.name + "\": not finished in the time given");
    std::unique_lock lock(mutex_);
    while (!ended_) {
      const std::shared_ptr<Ticket> step = step_;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      if (timeout.count() >= 0 && left.count() <= 0) return late;
      lock.unlock();
      // Tell the step that a user waits for it.
      if (step) {
        Status status = step->Wait(
            timeout.count() < 0 ? timeout : std::max(left, std::chrono::milliseconds(1)));
        if (!status.ok()) late = std::move(status);  // names the awaited ranks
      }
      lock.lock();
      // The first thread to be notified sets the next step.
      const auto moved_on = [&] { return ended_ || step_ != step; };
      if (timeout.count() < 0) {
        changed_.wait(lock, moved_on);
      } else {
        changed_.wait_until(lock, deadline, moved_on);
      }
    }
    std::shared_ptr<void> released = std::move(request_.keep_alive);
    const Status status = status_;
    lock.unlock();
    return status;
  }

  // Applies to the remaining steps, too.
  void UserWaits() override {
    std::unique_lock lock(mutex_);
    user_waits_ = true;
    const std::shared_ptr<Ticket> step = step_;
    lock.unlock();
    if (step) step->UserWaits();
  }

  bool Rejected() const override {
    const std::lock_guard lock(mutex_);
    return ended_ && status_.code() == StatusCode::kInvalidArgument;
  }

  void OnDone(std::function<void(const Status&)> done) override {
    {
      const std::lock_guard lock(mutex_);
      if (!ended_) {
        callback_ = std::move(done);
        return;
      }
    }
    done(status_);
  }

  const std::vector<int64_t>& received_splits() const override { return none_; }
  int64_t value() const override { return verdict_[kValue]; }
  DeviceEvent done_event() const override { return event_; }

 private:
  using Next = void (Climb::*)(const Ticket*);

  Request Inside(OpKind kind, HostStep step) const {
    Request request;
    request.name = request_.name;
    request.host_step = step;
    request.kind = kind;
    request.process_set = host_set_;
    request.root_rank = kind == OpKind::kBroadcast ? host_.front() : -1;
    request.stream = request_.stream;
    request.recurring = request_.recurring;
    request.op = OpOfSteps();
    request.terms = TermsOf(request_);
    for (const HostPiece& piece : pieces_) {
      if (kind == OpKind::kBroadcast && !piece.result) continue;
      Contribution tensor;
      tensor.input = kind == OpKind::kAllReduce ? piece.input : piece.output;
      tensor.output = piece.output;
      request.tensors.push_back(std::move(tensor));
    }
    return request;
  }

  ReduceOp OpOfSteps() const {
    return request_.op == ReduceOp::kAverage ? ReduceOp::kSum : request_.op;
  }

  // The outputs hold the sums of the hosts by now. Scaling is left to this step.
  void Across(const Ticket* before) {
    if (before != nullptr && IsAbsent(before, host_.front())) {
      const auto lives = [&](int rank) { return !IsAbsent(before, rank); };
      const int deputy = *std::find_if(host_.begin(), host_.end(), lives);
      const bool brings = deputy == engine_.world().rank || OpOfSteps() != ReduceOp::kSum;
      return Together(brings ? Part::kOrphan : Part::kNone);
    }
    if (!leads_) return Judge(nullptr);
    Request request = request_;
    request.host_step = HostStep::kAcross;
    request.sums_of_hosts = true;
    request.terms = TermsOf(request_);
    request.process_set = leader_set_;
    const auto ranks = static_cast<double>(engine_.world().size);
    if (request_.op == ReduceOp::kAverage && request_.method.none()) {
      request.op = ReduceOp::kSum;
      request.postscale /= ranks;
    } else if (request_.op == ReduceOp::kAverage) {
      // This way, a method keeps what it would keep in a job with one rank per host, and a
      // checkpoint of either can be loaded by the other.
      request.prescale *= static_cast<double>(plan_.hosts.size()) / ranks;
    }
    request.keep_alive = nullptr;
    for (Contribution& tensor : request.tensors) {
      if (before == nullptr) break;
      if (tensor.layers.empty()) tensor.input = tensor.output;
      for (LayerInput& layer : tensor.layers) {
        layer.dense.data = layer.output.data;
        layer.dense_bias.data = layer.output_bias.data;
      }
    }
    Follow(std::move(request), &Climb::Judge);
  }

  // The ranks of this host did not agree, and other hosts wait for it. They learn of it by what
  // differs from theirs.
  void Withdraw(const Status& why) {
    why_ = why;
    if (!leads_) return WithdrawFromAll();
    Refuse(HostStep::kAcross, leader_set_, [](Climb& self) { self.WithdrawFromAll(); });
  }

  void WithdrawFromAll() {
    // Misuse that other ranks may not know of.
    if (why_.code() == StatusCode::kInvalidArgument) return End(why_);
    Refuse(HostStep::kOrphans, 0, [](Climb& self) { self.End(self.why_); });
  }

  void Refuse(HostStep step_of_others, int process_set, void (*then)(Climb&)) {
    Request request;
    request.name = request_.name;
    request.host_step = step_of_others;
    request.process_set = process_set;
    request.stream = request_.stream;
    request.recurring = false;
    request.tensors.emplace_back();
    request.tensors[0].input.dtype = request.tensors[0].output.dtype = DType::kUint8;
    request.tensors[0].input.shape = request.tensors[0].output.shape = {0};
    const std::shared_ptr<Ticket> step = engine_.Submit(std::move(request));
    step->OnDone([self = shared_from_this(), step, then](const Status&) { then(*self); });
  }

  // If hosts do not agree, that is an error on all ranks of a host, but only one of them has seen
  // it; and what the method found is for all ranks.
  void Judge(const Ticket* across) {
    if (across != nullptr && verdict_[kFailed] == 0) {
      verdict_[kValue] = OfAllRanks(across->value());
      const std::vector<int> leaders = plan_.Leaders();
      const auto lives = [&](int rank) { return !IsAbsent(across, rank); };
      verdict_[kMissing] = std::all_of(leaders.begin(), leaders.end(), lives) ? 0 : 1;
      speaks_ = *std::find_if(leaders.begin(), leaders.end(), lives) == engine_.world().rank;
    }
    if (host_set_ < 0) return verdict_[kFailed] == 0 ? AtLast(nullptr) : WithdrawFromAll();
    Request request = Inside(OpKind::kBroadcast, HostStep::kVerdict);
    request.tensors.resize(1);
    TensorView& view = request.tensors[0].input;
    view = TensorView();
    view.data = verdict_.data();
    view.dtype = DType::kInt64;
    view.shape = {static_cast<int64_t>(verdict_.size())};
    request.tensors[0].output = view;
    Follow(std::move(request), &Climb::Down);
  }

  // A rank that the value names is one of the leaders.
  int64_t OfAllRanks(int64_t value) const {
    const int64_t leader = (value >> kRankShift) - 1;
    if (value < 0 || leader < 0 || leader >= static_cast<int64_t>(plan_.hosts.size())) return value;
    const int64_t flags = value & ((int64_t{1} << kRankShift) - 1);
    return (int64_t{plan_.hosts[static_cast<size_t>(leader)].front()} + 1) << kRankShift | flags;
  }

  void Down(const Ticket*) {
    if (verdict_[kFailed] != 0) {
      if (!leads_) {
        why_ = Status::FailedPrecondition("\"" + request_.name + "\": rank " +
                                          std::to_string(host_.front()) +
                                          " could not exchange it with other hosts");
      }
      return WithdrawFromAll();
    }
    Follow(Inside(OpKind::kBroadcast, HostStep::kDown), &Climb::AtLast);
  }

  void AtLast(const Ticket*) {
    if (verdict_[kMissing] == 0) return Finish(nullptr);
    Together(speaks_ ? Part::kResult : Part::kNone);
  }

  // What a rank contributes to the last step: of each sum one rank contributes, of a maximum all
  // may.
  enum class Part { kNone, kResult, kOrphan };

  void Together(Part part) {
    const double average = request_.op == ReduceOp::kAverage ? 1.0 / engine_.world().size : 1.0;
    const double scale = request_.prescale * request_.postscale * average;
    Request request;
    request.name = request_.name;
    request.host_step = HostStep::kOrphans;
    request.op = OpOfSteps();
    request.terms = TermsOf(request_);
    request.stream = request_.stream;
    request.recurring = false;
    for (const HostPiece& piece : pieces_) {
      if (!piece.result) continue;
      if (const char* why = NeedsLeaders(piece.output, scale)) {
        return End(Status::FailedPrecondition("\"" + request_.name +
                                              "\": a rank that leads its host has joined, and " +
                                              why + "; unset HOROVOD_HIERARCHICAL_ALLREDUCE"));
      }
      Contribution tensor;
      tensor.output = tensor.input = piece.output;
      if (part == Part::kOrphan) Scale(piece.output, scale);
      if (part == Part::kOrphan && piece.out > 0) Transpose(piece.output, piece.out);
      if (part == Part::kNone && request.op == ReduceOp::kSum) tensor.input = Zeros(piece.output);
      request.tensors.push_back(std::move(tensor));
    }
    if (!request_.method.none()) {
      // Ranks with orphans have not received what the method found.
      verdict_[kValue] = part == Part::kResult ? verdict_[kValue] + 1 : 0;
      Contribution value;
      value.input.data = &verdict_[kValue];
      value.input.dtype = DType::kInt64;
      value.input.shape = {1};
      value.output = value.input;
      request.tensors.push_back(std::move(value));
    }
    Follow(std::move(request), &Climb::Reunited);
  }

  void Reunited(const Ticket*) {
    if (!request_.method.none()) --verdict_[kValue];
    Finish(nullptr);
  }

  static void Scale(const TensorView& values, double scale) {
    if (scale == 1.0) return;
    const void* const from[] = {values.data};
    ReduceInRankOrder(from, values.data, values.num_elements(), values.dtype, ReduceOp::kSum, scale,
                      1.0, 1);
  }

  // out × in becomes in × out.
  static void Transpose(const TensorView& values, int64_t out) {
    const size_t size = SizeOf(values.dtype);
    const int64_t in = values.num_elements() / out;
    auto* const to = static_cast<std::byte*>(values.data);
    const std::vector<std::byte> from(to, to + values.num_bytes());
    for (int64_t i = 0; i < out; ++i) {
      for (int64_t j = 0; j < in; ++j) {
        std::memcpy(to + static_cast<size_t>(j * out + i) * size,
                    from.data() + static_cast<size_t>(i * in + j) * size, size);
      }
    }
  }

  TensorView Zeros(const TensorView& like) {
    TensorView view = like;
    AlignedBuffer& memory = zeros_.emplace_back(like.num_bytes());
    if (memory.size() > 0) std::memset(memory.data(), 0, memory.size());
    view.data = memory.data();
    return view;
  }

  // Why orphans of this kind cannot be added later than the others; null: they can.
  const char* NeedsLeaders(const TensorView& values, double scale) const {
    if (values.device != DeviceType::kCpu) return "sums on devices need it";
    if (request_.op == ReduceOp::kProduct) return "products need it";
    if (scale != 1.0 && !IsFloating(values.dtype)) return "an average of integers is made at once";
    return nullptr;
  }

  static bool IsAbsent(const Ticket* step, int rank) {
    const auto* state = dynamic_cast<const RequestState*>(step);
    return state != nullptr &&
           std::find(state->absent.begin(), state->absent.end(), rank) != state->absent.end();
  }

  void Finish(const Ticket*) { End(Status::Ok()); }

  // Each step follows the previous one on the device, too.
  void Follow(Request request, Next next) {
    const DeviceEvent event = event_;
    if (event != nullptr) {
      for (Contribution& tensor : request.tensors) {
        tensor.input.ready_event = tensor.output.ready_event = event.get();
        for (LayerInput& layer : tensor.layers) {
          for (TensorView* view : {&layer.dense, &layer.dense_bias, &layer.dense_square,
                                   &layer.dense_bias_square, &layer.output, &layer.output_bias}) {
            view->ready_event = event.get();
          }
        }
      }
    }
    // The user's tensors and the event, kept as long as the step needs them.
    using Both = std::pair<std::shared_ptr<void>, DeviceEvent>;
    request.keep_alive = std::make_shared<Both>(request_.keep_alive, event);
    const std::shared_ptr<Ticket> step = engine_.Submit(std::move(request));
    bool user_waits = false;
    {
      const std::lock_guard lock(mutex_);
      step_ = step;
      user_waits = user_waits_;
    }
    changed_.notify_all();
    if (user_waits) step->UserWaits();
    step->OnDone([self = shared_from_this(), step, next](const Status& status) {
      if (DeviceEvent done = step->done_event()) self->event_ = std::move(done);
      if (!status.ok() && next == &Climb::Judge) {
        self->why_ = status;
        self->verdict_[kFailed] = 1;
      } else if (!status.ok()) {
        return next == &Climb::Across ? self->Withdraw(status) : self->End(status);
      }
      (self.get()->*next)(step.get());
    });
  }

  void End(const Status& status) {
    std::function<void(const Status&)> callback;
    {
      const std::lock_guard lock(mutex_);
      status_ = status;
      ended_ = true;
      callback = std::move(callback_);
    }
    changed_.notify_all();
    if (callback) callback(status);
    open_->Remove(this);
  }

  static constexpr size_t kFailed = 0;
  static constexpr size_t kValue = 1;
  static constexpr size_t kMissing = 2;  // some leader has joined

  Engine& engine_;
  const HostPlan plan_;
  const std::vector<int> host_;
  const std::shared_ptr<OpenClimbs> open_;
  const std::shared_ptr<AgreedNames> agreed_;
  const int host_set_;
  const int leader_set_;
  const bool leads_;
  Request request_;
  const std::vector<HostPiece> pieces_;
  const std::vector<int64_t> none_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<Ticket> step_;
  bool user_waits_ = false;
  bool ended_ = false;
  Status status_;
  std::function<void(const Status&)> callback_;
  // Of one step after the other.
  DeviceEvent event_;
  std::array<int64_t, 3> verdict_ = {0, -1, 0};
  bool speaks_ = false;  // whether it speaks for all hosts that have exchanged
  Status why_;
  std::deque<AlignedBuffer> zeros_;
};

Hierarchy::Hierarchy(Engine& engine, HostPlan plan)
    : engine_(engine),
      plan_(std::move(plan)),
      host_(plan_.HostOf(engine.world().rank)),
      open_(std::make_shared<OpenClimbs>()),
      agreed_(std::make_shared<AgreedNames>()) {}

Result<std::unique_ptr<Hierarchy>> Hierarchy::Make(Engine& engine, HostPlan plan,
                                                   std::chrono::milliseconds timeout) {
  std::unique_ptr<Hierarchy> made(new Hierarchy(engine, std::move(plan)));
  const auto everybody = static_cast<size_t>(engine.world().size);
  if (made->host_.empty()) return Status::InvalidArgument("a plan of hosts without this rank");
  // All ranks, or this one alone, need no process set of their own.
  const auto add = [&](const std::vector<int>& ranks) -> Result<int> {
    if (ranks.size() == everybody) return 0;
    Request request;
    request.kind = OpKind::kAddProcessSet;
    request.name = kHiddenSet + ToString(Shape(ranks.begin(), ranks.end()));
    request.ranks = ranks;
    request.recurring = false;
    const std::shared_ptr<Ticket> ticket = engine.Submit(std::move(request));
    DAD_RETURN_IF_ERROR(ticket->Wait(timeout));
    return static_cast<int>(ticket->value());
  };
  for (const std::vector<int>& host : made->plan_.hosts) {
    if (host.size() == 1) continue;
    const Result<int> set = add(host);
    if (!set.ok()) return set.status();
    if (host == made->host_) made->host_set_ = set.value();
  }
  if (made->plan_.hosts.size() > 1) {
    const Result<int> set = add(made->plan_.Leaders());
    if (!set.ok()) return set.status();
    made->leader_set_ = set.value();
  }
  return made;
}

void Hierarchy::AllHaveJoined() { agreed_->Clear(); }

// What ranks compare: the steps do not show all of it, and only leaders take part in all steps.
std::string Hierarchy::TermsOf(const Request& request) {
  std::ostringstream terms;
  terms << Name(request.op) << ", prescale " << request.prescale << ", postscale "
        << request.postscale << ", method " << request.method.text();
  return terms.str();
}

void Hierarchy::WhenIdle(std::function<void()> then) { open_->WhenNone(std::move(then)); }

bool Hierarchy::leads() const { return host_.front() == engine_.world().rank; }

std::shared_ptr<Ticket> Hierarchy::Submit(Request request) {
  Result<std::vector<HostPiece>> pieces = HostPiecesOf(request);
  if (pieces.ok() && leader_set_ < 0) {
    // There is one host: the step up is all that is needed.
    return engine_.Submit(std::move(request));
  }
  const Status status = pieces.status();
  const auto climb =
      std::make_shared<Climb>(*this, std::move(request),
                              pieces.ok() ? std::move(pieces).value() : std::vector<HostPiece>());
  if (status.ok()) {
    climb->Start();
  } else {
    climb->Fail(status);
  }
  return climb;
}

}  // namespace dad
