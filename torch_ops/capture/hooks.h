// Finds the hooks that see a gradient on its way to a parameter.
#pragma once

#include <ATen/core/Tensor.h>

namespace dad_torch {

// Whether one of the hooks on a parameter looks at its gradient, or changes it; without a judge all
// do (HasHooks in capture_graph.h). Called by threads without the GIL.
using HookJudge = bool (*)(const at::Tensor& param);
void SetHookJudge(HookJudge judge);

}  // namespace dad_torch
