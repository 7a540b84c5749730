// Sums in two steps: inside each host, where links are fast, every tensor as it is (on devices: by
// NCCL); across hosts one rank of each, by whatever method the request names; and inside each host
// again, from that rank to the others. Only one rank per host computes and sends by the method.
//
// Made of process sets and ordinary requests: the engine knows nothing of it.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dad/engine.h"
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
HostPlan PlanHosts(std::span<const std::string> hostname_of_rank);

class Hierarchy {
 public:
  // Makes the process sets; every rank of the engine calls it, with the same plan. The engine must
  // outlive it and its tickets.
  static Result<std::unique_ptr<Hierarchy>> Make(Engine& engine, HostPlan plan,
                                                 std::chrono::milliseconds timeout);

  // An allreduce (Sum or Average) over all ranks. Rows cannot be added up inside a host: the
  // gradient of a layer that comes in factors is formed first, on the host only.
  std::shared_ptr<Ticket> Submit(Request request);

  static std::string NameOfRequest(const std::string& name_of_step);

 private:
  class Climb;
  Hierarchy(Engine& engine, HostPlan plan);

  Engine& engine_;
  const HostPlan plan_;
  const std::vector<int> host_;  // this rank's
  int host_set_ = -1;            // -1: alone on its host
  int leader_set_ = -1;          // -1: there is one host only
};

}  // namespace dad
