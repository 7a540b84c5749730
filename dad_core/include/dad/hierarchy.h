// Sums in two steps: inside each host, where links are fast, every tensor as it is (on devices: by
// NCCL); across hosts one rank of each, by whatever method the request names; and inside each host
// again, from that rank to the others. Only one rank per host computes and sends by the method.
//
// Made of process sets and ordinary requests: the engine knows nothing of it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dad/engine.h"
#include "dad/export.h"
#include "dad/request.h"
#include "dad/status.h"
#include "dad/ticket.h"

namespace dad {

// Which ranks share a host. Ranks and hosts in the order of ranks; the first of a host leads it.
struct HostPlan {
  std::vector<std::vector<int>> hosts;

  std::vector<int> Leaders() const;
  const std::vector<int>& HostOf(int rank) const;
};
DAD_EXPORT HostPlan PlanHosts(std::span<const std::string> hostname_of_rank);

class DAD_EXPORT Hierarchy {
 public:
  // Makes the process sets; every rank of the engine calls it, with the same plan. The engine must
  // outlive it and its tickets.
  static Result<std::unique_ptr<Hierarchy>> Make(Engine& engine, HostPlan plan,
                                                 std::chrono::milliseconds timeout);

  // An allreduce (not Adasum) over all ranks. A method other than "none" runs between one rank of
  // each host: an owner in its text counts hosts, and these ranks keep its state between steps,
  // under leader_set() and the request's name.
  //
  // Rows and weights of single ranks cannot be added up inside a host, so their gradient is formed
  // first, in host memory only. For methods that use the variance over samples, the squares are
  // added up beside it; on a device those given as dense_square, in place. Only leaders can ask
  // for a new plan.
  std::shared_ptr<Ticket> Submit(Request request);

  // Calls `then` once when this rank has no request in flight: at once, or in the thread that ends
  // the last one. A rank joins then: from the ranks that have joined, the others know which hosts'
  // sums are orphans. It must not be called again before that.
  void WhenIdle(std::function<void()> then);
  // Called before this rank goes on: ranks that had joined have missed what the others agreed on.
  void AllHaveJoined();

  const HostPlan& plan() const { return plan_; }
  bool leads() const;                             // this rank
  int leader_set() const { return leader_set_; }  // the process set of leaders; -1: one host only
  // What ranks must agree on about an allreduce, with or without the hierarchy.
  static std::string TermsOf(const Request& request);

 private:
  class Climb;
  class OpenClimbs;
  class AgreedNames;
  Hierarchy(Engine& engine, HostPlan plan);

  Engine& engine_;
  const HostPlan plan_;
  const std::vector<int> host_;  // this rank's
  const std::shared_ptr<OpenClimbs> open_;
  const std::shared_ptr<AgreedNames> agreed_;
  int host_set_ = -1;    // -1: alone on its host
  int leader_set_ = -1;  // -1: there is one host only
};

}  // namespace dad
