#include "dad/hierarchy.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string_view>
#include <utility>

#include "exchange/form_gradient.h"
#include "exchange/method.h"
#include "util/aligned_buffer.h"

namespace dad {
namespace {

Status Wrong(const Request& request, const std::string& why) {
  return Status::InvalidArgument("\"" + request.name + "\": " + why);
}

// What is added up inside a host, and where the sum goes.
struct Piece {
  TensorView input;
  TensorView output;
};

// Gradients that were formed here: a host's sum has no rows.
class Formed {
 public:
  Status Form(const Request& request, const LayerShape& shape, LayerInput& layer) {
    const bool on_host = layer.output.device == DeviceType::kCpu;
    if (!on_host || layer.dense_square.data != nullptr) {
      return Wrong(request, on_host ? "samples cannot be added up inside a host"
                                    : "rows on a device cannot be added up inside a host");
    }
    LayerInput formed;
    formed.output = layer.output;
    formed.output_bias = layer.output_bias;
    formed.transposed = layer.transposed;
    formed.dense = New(layer.output);
    if (shape.bias) formed.dense_bias = New(layer.output_bias);
    FormGradient(shape, layer, formed.dense, formed.dense_bias);
    layer = std::move(formed);
    return Status::Ok();
  }

 private:
  TensorView New(const TensorView& like) {
    TensorView view = like;
    view.data = memory_.emplace_back(like.num_bytes()).data();
    return view;
  }
  std::deque<AlignedBuffer> memory_;
};

bool HasRows(const LayerInput& layer) {
  return !layer.rows.empty() || !layer.indexed.empty() || layer.dense.data == nullptr ||
         layer.dense_square.data != nullptr;
}

// Leaves the request's layers with nothing but a dense part.
Result<std::vector<Piece>> PiecesOf(Request& request) {
  if (request.kind != OpKind::kAllReduce || request.op == ReduceOp::kAdasum) {
    return Wrong(request,
                 "only reductions in which the order does not matter go from host to host");
  }
  if (request.process_set != 0) return Wrong(request, "a hierarchy is for all ranks");
  const Result<MethodText> method = MethodText::Parse(request.method);
  if (!method.ok()) return method.status();
  std::shared_ptr<Formed> formed;
  std::vector<Piece> pieces;
  for (Contribution& tensor : request.tensors) {
    if (tensor.scale != 1.0) {
      return Wrong(request, "a rank's own weight does not go into a host's sum");
    }
    if (tensor.layers.empty()) pieces.push_back({tensor.input, tensor.output});
    for (size_t l = 0; l < tensor.layers.size(); ++l) {
      LayerInput& layer = tensor.layers[l];
      if (HasRows(layer)) {
        if (method.value().layers().size() != tensor.layers.size()) {
          return Wrong(request, "its method does not say what its layers are");
        }
        if (!formed) formed = std::make_shared<Formed>();
        DAD_RETURN_IF_ERROR(formed->Form(request, method.value().layers()[l], layer));
      }
      pieces.push_back({layer.dense, layer.output});
      if (layer.dense_bias.data != nullptr) pieces.push_back({layer.dense_bias, layer.output_bias});
    }
  }
  if (formed) {
    using Both = std::pair<std::shared_ptr<void>, std::shared_ptr<Formed>>;
    request.keep_alive = std::make_shared<Both>(std::move(request.keep_alive), std::move(formed));
  }
  return pieces;
}

// The method between hosts: an owner is the host of that rank.
std::string MethodAcross(const std::string& method, const HostPlan& plan) {
  const size_t at = method.find(";owner=");
  if (at == std::string::npos) return method;
  const size_t begin = at + std::string_view(";owner=").size();
  const size_t end = std::min(method.find(';', begin), method.size());
  const int owner = std::atoi(method.substr(begin, end - begin).c_str());
  for (size_t host = 0; host < plan.hosts.size(); ++host) {
    const std::vector<int>& ranks = plan.hosts[host];
    if (std::find(ranks.begin(), ranks.end(), owner) == ranks.end()) continue;
    return method.substr(0, begin) + std::to_string(host) + method.substr(end);
  }
  return method;
}

}  // namespace

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

// One request on its way: inside the host, across, inside again. Each step is submitted when the
// one before is done, by the thread that says so; nobody waits in between.
class Hierarchy::Climb final : public Ticket, public std::enable_shared_from_this<Climb> {
 public:
  Climb(const Hierarchy& hierarchy, Request request, std::vector<Piece> pieces)
      : engine_(hierarchy.engine_),
        plan_(hierarchy.plan_),
        host_(hierarchy.host_),
        host_set_(hierarchy.host_set_),
        leader_set_(hierarchy.leader_set_),
        leads_(hierarchy.host_.front() == hierarchy.engine_.world().rank),
        request_(std::move(request)),
        pieces_(std::move(pieces)) {}

  void Start() {
    if (host_set_ < 0) return Across(nullptr);  // its own sum
    Follow(Inside(OpKind::kAllReduce, "host"), &Climb::Across);
  }
  void Fail(const Status& why) { End(why); }

  bool Done() override {
    std::unique_lock lock(mutex_);
    if (ended_) return true;
    const std::shared_ptr<Ticket> step = step_;
    lock.unlock();
    if (step) (void)step->Done();  // it is looked at: the step should know
    return false;
  }

  Status Wait(std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    Status late = Status::Timeout("\"" + request_.name + "\": not finished in the time given");
    std::unique_lock lock(mutex_);
    while (!ended_) {
      const std::shared_ptr<Ticket> step = step_;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      if (timeout.count() >= 0 && left.count() <= 0) return late;
      lock.unlock();
      // The step is told that a user waits for it.
      if (step) {
        Status status = step->Wait(
            timeout.count() < 0 ? timeout : std::max(left, std::chrono::milliseconds(1)));
        if (!status.ok()) late = std::move(status);  // says who is waited for
      }
      lock.lock();
      // The one who was told first puts the next step here.
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

  Request Inside(OpKind kind, const char* step) const {
    Request request;
    request.name = request_.name + "." + step;
    request.kind = kind;
    request.process_set = host_set_;
    request.root_rank = kind == OpKind::kBroadcast ? host_.front() : -1;
    request.stream = request_.stream;
    request.recurring = request_.recurring;
    request.op = OpOfSteps();
    request.terms = Terms();
    for (const Piece& piece : pieces_) {
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

  // Steps do not show it all, and only leaders take all of them.
  std::string Terms() const {
    std::ostringstream terms;
    terms << Name(request_.op) << ", prescale " << request_.prescale << ", postscale "
          << request_.postscale << ", method " << request_.method;
    return terms.str();
  }

  // The sums of the hosts, in the outputs by now. Scaling is left to this step.
  void Across(const Ticket* before) {
    const double average = request_.op == ReduceOp::kAverage ? 1.0 / engine_.world().size : 1.0;
    if (!leads_) return Judge(nullptr);
    Request request = request_;
    request.name = request_.name + ".hosts";
    request.method = MethodAcross(request_.method, plan_);
    request.op = OpOfSteps();
    request.terms = Terms();
    request.process_set = leader_set_;
    request.postscale *= average;
    request.keep_alive = nullptr;
    for (Contribution& tensor : request.tensors) {
      if (before == nullptr) break;
      if (tensor.layers.empty()) tensor.input = tensor.output;
      for (LayerInput& layer : tensor.layers) {
        layer.dense = layer.output;
        layer.dense_bias = layer.output_bias;
      }
    }
    Follow(std::move(request), &Climb::Judge);
  }

  // The ranks of this host did not agree, and other hosts wait for it: they are to hear of it, and
  // do by what differs from theirs.
  void Withdraw(const Status& why) {
    why_ = why;
    if (!leads_) return End(why);
    Request request;
    request.name = request_.name + ".hosts";
    request.process_set = leader_set_;
    request.stream = request_.stream;
    request.recurring = false;
    request.tensors.emplace_back();
    request.tensors[0].input.dtype = request.tensors[0].output.dtype = DType::kUint8;
    request.tensors[0].input.shape = request.tensors[0].output.shape = {0};
    const std::shared_ptr<Ticket> step = engine_.Submit(std::move(request));
    step->OnDone([self = shared_from_this(), step](const Status&) { self->End(self->why_); });
  }

  // What hosts could not agree on is an error in all of a host, of which one rank only has seen it;
  // and what the method found is for all to know.
  void Judge(const Ticket* across) {
    if (across != nullptr) verdict_[kValue] = OfAllRanks(across->value());
    if (host_set_ < 0) return verdict_[kFailed] == 0 ? Finish(nullptr) : End(why_);
    Request request = Inside(OpKind::kBroadcast, "verdict");
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
      return End(leads_ ? why_
                        : Status::FailedPrecondition("\"" + request_.name + "\": rank " +
                                                     std::to_string(host_.front()) +
                                                     " could not exchange it with other hosts"));
    }
    Follow(Inside(OpKind::kBroadcast, "down"), &Climb::Finish);
  }

  void Finish(const Ticket*) { End(Status::Ok()); }

  // Each step comes after the one before on the device, too.
  void Follow(Request request, Next next) {
    const DeviceEvent event = event_;
    if (event != nullptr) {
      for (Contribution& tensor : request.tensors) {
        tensor.input.ready_event = tensor.output.ready_event = event.get();
        for (LayerInput& layer : tensor.layers) {
          for (TensorView* view :
               {&layer.dense, &layer.dense_bias, &layer.output, &layer.output_bias}) {
            view->ready_event = event.get();
          }
        }
      }
    }
    // The user's tensors, and the event, as long as the step needs them.
    using Both = std::pair<std::shared_ptr<void>, DeviceEvent>;
    request.keep_alive = std::make_shared<Both>(request_.keep_alive, event);
    const std::shared_ptr<Ticket> step = engine_.Submit(std::move(request));
    {
      const std::lock_guard lock(mutex_);
      step_ = step;
    }
    changed_.notify_all();
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
  }

  static constexpr size_t kFailed = 0;
  static constexpr size_t kValue = 1;

  Engine& engine_;
  const HostPlan plan_;
  const std::vector<int> host_;
  const int host_set_;
  const int leader_set_;
  const bool leads_;
  Request request_;
  const std::vector<Piece> pieces_;
  const std::vector<int64_t> none_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<Ticket> step_;
  bool ended_ = false;
  Status status_;
  std::function<void(const Status&)> callback_;
  // Of one step after the other.
  DeviceEvent event_;
  std::array<int64_t, 2> verdict_ = {0, -1};
  Status why_;
};

Hierarchy::Hierarchy(Engine& engine, HostPlan plan)
    : engine_(engine), plan_(std::move(plan)), host_(plan_.HostOf(engine.world().rank)) {}

Result<std::unique_ptr<Hierarchy>> Hierarchy::Make(Engine& engine, HostPlan plan,
                                                   std::chrono::milliseconds timeout) {
  std::unique_ptr<Hierarchy> made(new Hierarchy(engine, std::move(plan)));
  const auto everybody = static_cast<size_t>(engine.world().size);
  if (made->host_.empty()) return Status::InvalidArgument("a plan of hosts without this rank");
  // A set of all ranks, or of this one alone, needs none.
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

std::string Hierarchy::NameOfRequest(const std::string& name_of_step) {
  for (const std::string_view step : {".host", ".hosts", ".verdict", ".down"}) {
    if (name_of_step.ends_with(step)) {
      return name_of_step.substr(0, name_of_step.size() - step.size());
    }
  }
  return name_of_step;
}

std::shared_ptr<Ticket> Hierarchy::Submit(Request request) {
  Result<std::vector<Piece>> pieces = PiecesOf(request);
  if (pieces.ok() && leader_set_ < 0) {
    // One host: the way up is all there is.
    return engine_.Submit(std::move(request));
  }
  const Status status = pieces.status();
  const auto climb = std::make_shared<Climb>(
      *this, std::move(request), pieces.ok() ? std::move(pieces).value() : std::vector<Piece>());
  if (status.ok()) {
    climb->Start();
  } else {
    climb->Fail(status);
  }
  return climb;
}

}  // namespace dad
