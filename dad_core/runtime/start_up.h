// What ranks settle between them before the first request.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dad/options.h"
#include "dad/status.h"
#include "linalg/cpu_level.h"
#include "transport/transport.h"

namespace dad {

struct StartUp {
  // The same on all ranks: where they differed, rank 0's.
  Options options;
  // Rank 0's wall clock minus ours.
  int64_t clock_offset_us = 0;
  // The least over all ranks.
  CpuLevel cpu_level = CpuLevel::kBaseline;
  // Of each rank.
  std::vector<std::string> hostnames;
};

// Fails on every rank, naming it, when one has another version or other process sets.
Result<StartUp> AgreeOnStart(Transport& transport, const Options& mine, const std::string& hostname,
                             const std::vector<std::vector<int>>& process_sets);

}  // namespace dad
