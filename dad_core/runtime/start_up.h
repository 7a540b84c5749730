// What ranks agree on before the first request.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dad/engine.h"
#include "dad/options.h"
#include "dad/status.h"
#include "exchange/exchange.h"
#include "linalg/cpu_level.h"
#include "transport/transport.h"

namespace dad {

// What methods of device tensors are computed with.
struct DeviceMethods {
  std::shared_ptr<DeviceBench> bench;  // null: on the host
  bool products = false;               // the products of all ranks have the same bits
  std::string why;                     // what is missing: the rank, and what it lacks
};

struct StartUp {
  // The same on all ranks: rank 0's value if they differed.
  Options options;
  // Rank 0's wall clock minus ours.
  int64_t clock_offset_us = 0;
  // The least over all ranks.
  CpuLevel cpu_level = CpuLevel::kBaseline;
  // Of each rank.
  std::vector<std::string> hostnames;
  DeviceMethods device_methods;
};

// Fails on every rank, naming it, if one rank has another version or other process sets.
Result<StartUp> AgreeOnStart(Transport& transport, const Options& mine, const World& world,
                             const std::vector<std::vector<int>>& process_sets);

}  // namespace dad
