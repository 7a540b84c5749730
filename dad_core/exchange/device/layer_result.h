// What all ranks apply to a layer, from its factors.
#pragma once

#include "dad/contribution.h"
#include "dad/method.h"
#include "exchange/device/arena.h"
#include "exchange/device/low_rank_side.h"

namespace dad {

// Writes scale · utᵀ vt to the layer's outputs; NaN if `nothing`.
Status WriteFactors(DeviceBench& bench, const LayerInput& layer, const LayerShape& shape,
                    const DeviceFactors& factors, float scale, bool nothing, DeviceArena& arena);

}  // namespace dad
