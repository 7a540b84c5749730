#include "runtime/hierarchy/hierarchical_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <string>
#include <utility>

#include "runtime/request_state.h"
#include "runtime/running_numbers.h"

namespace dad {
namespace {

// Decided by what ranks agree on, so all ranks decide alike. Rows go between all ranks, because a
// host cannot add them up.
bool Climbs(const Request& request) {
  return request.kind == OpKind::kAllReduce && request.process_set == 0 &&
         !ExchangesRows(request.method) && request.op != ReduceOp::kAdasum;
}

// The steps of a request count as one request.
Stats Folded(Stats stats) {
  std::map<std::string, TensorStats> by_name;
  for (TensorStats& step : stats.tensors) {
    const std::string name = step.name;
    if (step.host_step == HostStep::kAcross) {
      step.hosts_bytes_sent = step.wire_bytes_sent;
      step.recent.hosts_sent = step.recent.sent;
    }
    auto [found, is_new] = by_name.try_emplace(name, step);
    TensorStats& all = found->second;
    all.host_step = HostStep::kNone;
    if (is_new) continue;
    all.steps = std::max(all.steps, step.steps);
    all.wire_bytes_sent += step.wire_bytes_sent;
    all.hosts_bytes_sent += step.hosts_bytes_sent;
    all.wire_bytes_received += step.wire_bytes_received;
    all.device_bytes += step.device_bytes;
    all.dense_bytes = std::max(all.dense_bytes, step.dense_bytes);
    all.effective = std::max(all.effective, step.effective);
    all.captured = std::max(all.captured, step.captured);
    all.seconds += step.seconds;
    all.recent.steps = std::max(all.recent.steps, step.recent.steps);
    all.recent.sent += step.recent.sent;
    all.recent.hosts_sent += step.recent.hosts_sent;
    all.recent.seconds += step.recent.seconds;
    if (step.worst.seconds > all.worst.seconds) all.worst = step.worst;
  }
  stats.tensors.clear();
  for (auto& [name, one] : by_name) stats.tensors.push_back(std::move(one));
  return stats;
}

class HierarchicalEngine final : public Engine {
 public:
  HierarchicalEngine(std::unique_ptr<Engine> engine, std::unique_ptr<Hierarchy> hierarchy)
      : engine_(std::move(engine)), hierarchy_(std::move(hierarchy)) {}

  std::shared_ptr<Ticket> Submit(Request request) override {
    if (request.kind == OpKind::kJoin) return Join(std::move(request));
    if (Climbs(request)) return hierarchy_->Submit(std::move(request));
    // If another rank sends it up by hosts, the two meet by their name (hierarchy.cc).
    if (request.kind == OpKind::kAllReduce && request.process_set == 0) {
      request.terms = Hierarchy::TermsOf(request);
    }
    return engine_->Submit(std::move(request));
  }

  std::shared_ptr<Ticket> SubmitUnnamed(Request request, std::string* name) override {
    return numbers_.Submit(*this, std::move(request), name);
  }
  int64_t num_joins() const override { return engine_->num_joins(); }

  void GiveUp(uint64_t step, const Status& why) override { engine_->GiveUp(step, why); }

  const World& world() const override { return engine_->world(); }
  Options options() const override { return engine_->options(); }
  std::vector<int> ProcessSetRanks(int id) const override { return engine_->ProcessSetRanks(id); }
  std::vector<int> ProcessSetIds() const override { return engine_->ProcessSetIds(); }
  std::vector<std::vector<int>> Hosts() const override { return hierarchy_->plan().hosts; }
  Stats GetStats() const override { return Folded(engine_->GetStats()); }
  void ResetStats() override { engine_->ResetStats(); }
  std::vector<Wanted> GetWanted() const override { return engine_->GetWanted(); }
  void Inspect(std::function<void(std::vector<Snapshot>)> done) const override {
    engine_->Inspect(std::move(done));
  }
  Status StartTimeline(const std::string& path, bool mark_cycles) override {
    return engine_->StartTimeline(path, mark_cycles);
  }
  Status StopTimeline() override { return engine_->StopTimeline(); }
  Status health() const override { return engine_->health(); }

  // Methods keep their state on the leaders. Other ranks have none.
  std::vector<StateTensor> ExportState(int process_set, uint32_t stream,
                                       const std::string& name) const override {
    if (process_set != 0) return engine_->ExportState(process_set, stream, name);
    if (!hierarchy_->leads()) return {};
    return engine_->ExportState(hierarchy_->leader_set(), stream, name);
  }
  void ImportState(int process_set, uint32_t stream, const std::string& name,
                   std::vector<StateTensor> tensors) override {
    if (process_set != 0) {
      engine_->ImportState(process_set, stream, name, std::move(tensors));
    } else if (hierarchy_->leads()) {
      engine_->ImportState(hierarchy_->leader_set(), stream, name, std::move(tensors));
    }
  }
  void ReturnLast(int process_set, uint32_t stream) override {
    engine_->ReturnLast(SetOfStates(process_set), stream);
  }
  void DropStates(int process_set, uint32_t stream) override {
    engine_->DropStates(SetOfStates(process_set), stream);
  }

 private:
  std::shared_ptr<Ticket> Join(Request request) {
    auto outer = std::make_shared<RequestState>(request, nullptr, nullptr);
    if (joins_.exchange(true)) {
      outer->Complete(Status::InvalidArgument("join: this rank has joined already"));
      return outer;
    }
    hierarchy_->WhenIdle([this, outer, request = std::move(request)] {
      const std::shared_ptr<Ticket> joined = engine_->Submit(request);
      joined->OnDone([this, outer, joined](const Status& status) {
        joins_ = false;
        hierarchy_->AllHaveJoined();
        outer->result_value = joined->value();
        outer->Complete(status);
      });
    });
    return outer;
  }

  int SetOfStates(int process_set) const {
    return process_set == 0 ? hierarchy_->leader_set() : process_set;
  }

  RunningNumbers numbers_;
  std::atomic<bool> joins_{false};        // this rank has called join, and some have not yet
  const std::unique_ptr<Engine> engine_;  // outlives the hierarchy
  const std::unique_ptr<Hierarchy> hierarchy_;
};

}  // namespace

Result<std::unique_ptr<Engine>> MakeHierarchicalEngine(std::unique_ptr<Engine> engine,
                                                       HostPlan plan) {
  const std::chrono::milliseconds timeout(
      static_cast<int64_t>(engine->options().start_timeout_seconds * 1000));
  Result<std::unique_ptr<Hierarchy>> hierarchy = Hierarchy::Make(*engine, std::move(plan), timeout);
  if (!hierarchy.ok()) return hierarchy.status();
  return std::unique_ptr<Engine>(
      new HierarchicalEngine(std::move(engine), std::move(hierarchy).value()));
}

}  // namespace dad
