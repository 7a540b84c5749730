#include "runtime/hierarchical_engine.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <utility>

#include "runtime/request_state.h"

namespace dad {
namespace {

// By what ranks agree on, or else some would climb and others not. Methods go between all ranks:
// what they send is small, and what they keep is each rank's own.
bool Climbs(const Request& request) {
  return request.kind == OpKind::kAllReduce && request.process_set == 0 &&
         request.method == "none" && request.op != ReduceOp::kAdasum;
}

// The steps of a request count as the request, as if there were none.
Stats Folded(Stats stats) {
  std::map<std::string, TensorStats> by_name;
  for (const TensorStats& step : stats.tensors) {
    const std::string name = Hierarchy::NameOfRequest(step.name);
    auto [found, is_new] = by_name.try_emplace(name, step);
    TensorStats& all = found->second;
    all.name = name;
    if (is_new) continue;
    all.steps = std::max(all.steps, step.steps);
    all.wire_bytes_sent += step.wire_bytes_sent;
    all.wire_bytes_received += step.wire_bytes_received;
    all.device_bytes += step.device_bytes;
    all.dense_bytes = std::max(all.dense_bytes, step.dense_bytes);
    all.effective = std::max(all.effective, step.effective);
    all.seconds += step.seconds;
    all.recent.steps = std::max(all.recent.steps, step.recent.steps);
    all.recent.sent += step.recent.sent;
    all.recent.seconds += step.recent.seconds;
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
    if (request.kind == OpKind::kJoin) {
      auto state = std::make_shared<RequestState>(std::move(request), nullptr, nullptr);
      state->Complete(Status::FailedPrecondition(
          "join: not with hierarchical_allreduce, since the sum of a host needs all of its ranks; "
          "unset HOROVOD_HIERARCHICAL_ALLREDUCE"));
      return state;
    }
    return Climbs(request) ? hierarchy_->Submit(std::move(request))
                           : engine_->Submit(std::move(request));
  }

  void GiveUp(uint64_t step, const Status& why) override { engine_->GiveUp(step, why); }

  const World& world() const override { return engine_->world(); }
  Options options() const override { return engine_->options(); }
  std::vector<int> ProcessSetRanks(int id) const override { return engine_->ProcessSetRanks(id); }
  std::vector<int> ProcessSetIds() const override { return engine_->ProcessSetIds(); }
  Stats GetStats() const override { return Folded(engine_->GetStats()); }
  void ResetStats() override { engine_->ResetStats(); }
  Status StartTimeline(const std::string& path, bool mark_cycles) override {
    return engine_->StartTimeline(path, mark_cycles);
  }
  Status StopTimeline() override { return engine_->StopTimeline(); }
  Status health() const override { return engine_->health(); }

  std::vector<StateTensor> ExportState(int process_set, uint32_t stream,
                                       const std::string& name) const override {
    return engine_->ExportState(process_set, stream, name);
  }
  void ImportState(int process_set, uint32_t stream, const std::string& name,
                   std::vector<StateTensor> tensors) override {
    engine_->ImportState(process_set, stream, name, std::move(tensors));
  }
  void ReturnLast(int process_set, uint32_t stream) override {
    engine_->ReturnLast(process_set, stream);
  }
  void DropStates(int process_set, uint32_t stream) override {
    engine_->DropStates(process_set, stream);
  }

 private:
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
