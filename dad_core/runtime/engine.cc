#include "dad/engine.h"

#include <algorithm>
#include <thread>

#include "runtime/hierarchy/hierarchical_engine.h"
#include "runtime/lane/validate.h"
#include "runtime/request_state.h"
#include "runtime/running_numbers.h"
#include "runtime/solo.h"
#include "runtime/start_up.h"
#include "runtime/worker.h"
#include "transport/registry.h"
#include "util/log.h"

namespace dad {
namespace {

LogLevel ParseLevel(const std::string& name) {
  static constexpr const char* kNames[] = {"TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"};
  for (int i = 0; i < 6; ++i) {
    if (name == kNames[i]) return static_cast<LogLevel>(i);
  }
  return LogLevel::kWarning;
}

// The number of threads that 0 stands for depends on the machine.
Options WithThreads(Options options, const World& world) {
  if (options.threads == 0) {
    const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
    options.threads = std::max<int64_t>(1, cores / std::max(1, world.local_size));
  }
  return options;
}

// Builds the parts and connects them; the worker does all the work.
class EngineImpl final : public Engine {
 public:
  EngineImpl(std::unique_ptr<Transport> transport, World world, const StartUp& start,
             std::vector<std::vector<int>> process_sets, std::string why_staged)
      : world_(std::move(world)),
        options_(WithThreads(start.options, world_)),
        worker_(std::move(transport), world_.hostname, options_, start.cpu_level,
                std::move(process_sets), std::move(why_staged), start.device_methods) {
    worker_.timeline().SetOffset(start.clock_offset_us);
  }

  std::shared_ptr<Ticket> Submit(Request request) override {
    Status refused;
    auto [state, goes] = Make(std::move(request), &refused);
    if (goes) {
      worker_.inbox()->Post(SubmitEvent{state});
    } else {
      state->Complete(refused.ok() ? RunAlone(*state) : refused);
    }
    return state;
  }

  std::shared_ptr<Ticket> SubmitUnnamed(Request request, std::string* name) override {
    return numbers_.Submit(*this, std::move(request), name);
  }
  int64_t num_joins() const override { return worker_.num_joins(); }

  Tickets SubmitAll(std::vector<Request> requests, bool user_waits, OneDone done) override {
    SubmitAllEvent all;
    Tickets tickets;
    for (size_t i = 0; i < requests.size(); ++i) {
      Status refused;
      auto [state, goes] = Make(std::move(requests[i]), &refused);
      tickets.push_back(state);
      if (!goes) {
        const Status outcome = refused.ok() ? RunAlone(*state) : refused;
        state->Complete(outcome);
        done(i, state, outcome);
        continue;
      }
      state->Watch(user_waits, [done, i, state](const Status& status) { done(i, state, status); });
      all.requests.push_back(state);
    }
    if (!all.requests.empty()) worker_.inbox()->Post(std::move(all));
    if (user_waits) phases_->UserWaits();
    return tickets;
  }

  void GiveUp(uint64_t step, const Status& why) override { worker_.GiveUp(step, why); }

  const World& world() const override { return world_; }
  Options options() const override { return options_; }
  std::vector<int> ProcessSetRanks(int id) const override { return worker_.ProcessSetRanks(id); }
  std::vector<int> ProcessSetIds() const override { return worker_.ProcessSetIds(); }
  std::vector<std::vector<int>> Hosts() const override { return {}; }
  Stats GetStats() const override { return worker_.GetStats(); }
  void ResetStats() override { worker_.ResetStats(); }
  std::vector<Wanted> GetWanted() const override { return worker_.GetWanted(); }
  void Inspect(std::function<void(std::vector<Snapshot>)> done) const override {
    worker_.Inspect(std::move(done));
  }
  Status StartTimeline(const std::string& path, bool mark_cycles) override {
    return worker_.timeline().Start(path, mark_cycles);
  }
  Status StopTimeline() override { return worker_.timeline().Stop(); }
  Status health() const override { return worker_.health(); }
  std::vector<StateTensor> ExportState(int process_set, uint32_t stream,
                                       const std::string& name) const override {
    return worker_.states().Export({process_set, stream, name});
  }
  void ImportState(int process_set, uint32_t stream, const std::string& name,
                   std::vector<StateTensor> tensors) override {
    worker_.states().Import({process_set, stream, name}, std::move(tensors));
  }
  void ReturnLast(int process_set, uint32_t stream) override {
    worker_.states().ReturnLast(process_set, stream);
  }
  void DropStates(int process_set, uint32_t stream) override {
    worker_.states().Drop(process_set, stream);
  }

 private:
  // And whether it goes to the worker: a rejected request does not, and neither does one of a job
  // of one rank.
  std::pair<std::shared_ptr<RequestState>, bool> Make(Request request, Status* refused) {
    const std::vector<int> ranks = worker_.ProcessSetRanks(request.process_set);
    *refused = Validate(request, world_.rank, ranks, world_.size);
    const bool on_device =
        !request.tensors.empty() && request.tensors[0].input.device != DeviceType::kCpu;
    const bool alone = ranks.size() == 1 && request.kind <= OpKind::kBarrier && !on_device;
    const bool goes = refused->ok() && !alone;
    auto state = std::make_shared<RequestState>(
        std::move(request), goes ? worker_.inbox() : nullptr, goes ? phases_ : nullptr);
    state->rejected = !refused->ok();
    return {std::move(state), goes};
  }

  const World world_;
  const Options options_;
  const std::shared_ptr<PhaseCounter> phases_ = std::make_shared<PhaseCounter>();
  RunningNumbers numbers_;
  mutable Worker worker_;
};

Result<std::unique_ptr<Engine>> Start(std::unique_ptr<Transport> transport, const World& world,
                                      const Options& options,
                                      std::vector<std::vector<int>> process_sets,
                                      std::string why_staged);

}  // namespace

Engine::Tickets Engine::SubmitAll(std::vector<Request> requests, bool user_waits, OneDone done) {
  Tickets tickets;
  for (size_t i = 0; i < requests.size(); ++i) {
    const std::shared_ptr<Ticket> ticket = Submit(std::move(requests[i]));
    ticket->OnDone([done, i, ticket](const Status& status) { done(i, ticket, status); });
    if (user_waits) ticket->UserWaits();
    tickets.push_back(ticket);
  }
  return tickets;
}

Result<std::unique_ptr<Engine>> Engine::Create(const World& world, const Options& options,
                                               std::vector<std::vector<int>> process_sets) {
  SetLogLevel(ParseLevel(options.log_level), options.log_hide_time);
  SetLogRank(world.rank);
  Result<std::unique_ptr<Transport>> transport = ConnectTransport(world.transport, world, options);
  if (!transport.ok()) return transport.status();
  Result<std::string> why_staged = AddDeviceCollectives(transport.value(), world, options);
  if (!why_staged.ok()) return why_staged.status();
  return Start(std::move(transport).value(), world, options, std::move(process_sets),
               std::move(why_staged).value());
}

Result<std::unique_ptr<Engine>> Engine::CreateOn(std::unique_ptr<Transport> transport,
                                                 const World& world, const Options& options,
                                                 std::vector<std::vector<int>> process_sets) {
  return Start(std::move(transport), world, options, std::move(process_sets), "");
}

namespace {

Result<std::unique_ptr<Engine>> Start(std::unique_ptr<Transport> transport, const World& world,
                                      const Options& options,
                                      std::vector<std::vector<int>> process_sets,
                                      std::string why_staged) {
  for (std::vector<int>& ranks : process_sets) {
    Request request;
    request.name = "init";
    request.kind = OpKind::kAddProcessSet;
    request.ranks = ranks;
    DAD_RETURN_IF_ERROR(Validate(request, world.rank, {}, world.size));
    std::sort(ranks.begin(), ranks.end());
  }
  Result<StartUp> start = AgreeOnStart(*transport, options, world, process_sets);
  if (!start.ok()) return start.status();
  auto engine = std::make_unique<EngineImpl>(std::move(transport), world, start.value(),
                                             std::move(process_sets), std::move(why_staged));
  // Horovod's "DYNAMIC" announces calls of start_timeline(), which needs no announcement here.
  if (!options.timeline.empty() && options.timeline != "DYNAMIC") {
    const std::string suffix = world.rank == 0 ? "" : "." + std::to_string(world.rank);
    DAD_RETURN_IF_ERROR(
        engine->StartTimeline(options.timeline + suffix, options.timeline_mark_cycles));
  }
  HostPlan hosts = PlanHosts(start.value().hostnames);
  const bool levels = hosts.hosts.size() > 1 && hosts.hosts.size() < start.value().hostnames.size();
  if (!start.value().options.hierarchical_allreduce || !levels) {
    return std::unique_ptr<Engine>(std::move(engine));
  }
  return MakeHierarchicalEngine(std::move(engine), std::move(hosts));
}

}  // namespace
}  // namespace dad
