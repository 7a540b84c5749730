#include "dad/hierarchy.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

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

Result<std::vector<Piece>> PiecesOf(const Request& request) {
  if (request.kind != OpKind::kAllReduce ||
      (request.op != ReduceOp::kSum && request.op != ReduceOp::kAverage)) {
    return Wrong(request, "only sums and averages go from host to host");
  }
  if (request.process_set != 0) return Wrong(request, "a hierarchy is for all ranks");
  std::vector<Piece> pieces;
  for (const Contribution& tensor : request.tensors) {
    if (tensor.scale != 1.0)
      return Wrong(request, "a rank's own weight does not go into a host's sum");
    if (tensor.layers.empty()) pieces.push_back({tensor.input, tensor.output});
    for (const LayerInput& layer : tensor.layers) {
      const bool dense_only =
          layer.rows.empty() && layer.indexed.empty() && layer.dense_square.data == nullptr &&
          layer.dense.data != nullptr &&
          (layer.output_bias.data == nullptr) == (layer.dense_bias.data == nullptr);
      if (!dense_only) {
        return Wrong(request,
                     "rows and samples cannot be added up inside a host; a dense part can");
      }
      pieces.push_back({layer.dense, layer.output});
      if (layer.dense_bias.data != nullptr) pieces.push_back({layer.dense_bias, layer.output_bias});
    }
  }
  return pieces;
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
  Climb(const Hierarchy& plan, Request request, std::vector<Piece> pieces)
      : engine_(plan.engine_),
        host_(plan.host_),
        host_set_(plan.host_set_),
        leader_set_(plan.leader_set_),
        leads_(plan.host_.front() == plan.engine_.world().rank),
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
    Status last = Status::Timeout("\"" + request_.name + "\": not finished in the time given");
    std::unique_lock lock(mutex_);
    while (!ended_) {
      const std::shared_ptr<Ticket> step = step_;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      if (timeout.count() >= 0 && left.count() <= 0) {
        return last;
      }
      lock.unlock();
      // The step is told that a user waits for it.
      if (step) {
        last = step->Wait(timeout.count() < 0 ? timeout
                                              : std::max(left, std::chrono::milliseconds(1)));
      }
      lock.lock();
      // The one who was told first puts the next step here.
      changed_.wait_for(lock, std::chrono::milliseconds(50),
                        [&] { return ended_ || step_ != step; });
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
  int64_t value() const override { return value_; }
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
    for (const Piece& piece : pieces_) {
      Contribution tensor;
      tensor.input = kind == OpKind::kAllReduce ? piece.input : piece.output;
      tensor.output = piece.output;
      request.tensors.push_back(std::move(tensor));
    }
    return request;
  }

  // The sums of the hosts, in the outputs by now. Scaling is left to this step.
  void Across(const Ticket* before) {
    const double average = request_.op == ReduceOp::kAverage ? 1.0 / engine_.world().size : 1.0;
    if (!leads_) return Judge(nullptr);
    Request request = request_;
    request.name += ".hosts";
    request.op = ReduceOp::kSum;
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

  // What hosts could not agree on is an error in all of a host, of which one rank only has seen it.
  void Judge(const Ticket* across) {
    if (across != nullptr) value_ = across->value();
    if (host_set_ < 0) return verdict_ == 0 ? Finish(nullptr) : End(why_);
    Request request = Inside(OpKind::kBroadcast, "verdict");
    request.tensors.resize(1);
    TensorView& view = request.tensors[0].input;
    view = TensorView();
    view.data = &verdict_;
    view.dtype = DType::kUint8;
    view.shape = {1};
    request.tensors[0].output = view;
    Follow(std::move(request), &Climb::Down);
  }

  void Down(const Ticket*) {
    if (verdict_ != 0) {
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
        self->verdict_ = 1;
      } else if (!status.ok()) {
        return self->End(status);
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

  Engine& engine_;
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
  int64_t value_ = -1;
  DeviceEvent event_;
  uint8_t verdict_ = 0;
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
    request.name = "hierarchy of " + ToString(Shape(ranks.begin(), ranks.end()));
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
