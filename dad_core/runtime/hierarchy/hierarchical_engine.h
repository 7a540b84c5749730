// An engine whose sums over all ranks go from host to host (option hierarchical_allreduce), the
// user-visible side of dad/hierarchy.h. Everything else, and exact factors, goes to the engine that
// it wraps.
#pragma once

#include <memory>

#include "dad/engine.h"
#include "dad/hierarchy.h"

namespace dad {

// All ranks call it with the same plan.
Result<std::unique_ptr<Engine>> MakeHierarchicalEngine(std::unique_ptr<Engine> engine,
                                                       HostPlan plan);

}  // namespace dad
