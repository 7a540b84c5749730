// The gradient of a layer from what was captured of it, for frameworks that gave a layer in factors
// and then need it formed.
#pragma once

#include "dad/contribution.h"
#include "dad/export.h"

namespace dad {

// The sum over the layer's rows, indexed rows and dense part, into `weight`: out × in, of a
// floating type, in memory of the host. One thread.
DAD_EXPORT void FormWeight(const LayerInput& layer, const TensorView& weight);

}  // namespace dad
