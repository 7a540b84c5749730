// The gradient of a layer from what was captured of it: rows, indexed rows and a part that came
// formed. For those who need it formed on one rank; exchanges of factors never do.
#pragma once

#include "dad/contribution.h"
#include "exchange/method.h"

namespace dad {

// Fills `weight` (out × in) and, with a bias, `bias`: in memory of the host, of any floating type.
void FormGradient(const LayerShape& shape, const LayerInput& layer, const TensorView& weight,
                  const TensorView& bias);

}  // namespace dad
