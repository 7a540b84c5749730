// An engine whose sums over all ranks go from host to host (option hierarchical_allreduce): what
// users see of dad/hierarchy.h. Everything else, and exact factors, goes to the engine it is made
// of.
#pragma once

#include <memory>

#include "dad/engine.h"
#include "dad/hierarchy.h"

namespace dad {

// Every rank calls it, with the same plan.
Result<std::unique_ptr<Engine>> MakeHierarchicalEngine(std::unique_ptr<Engine> engine,
                                                       HostPlan plan);

}  // namespace dad
