// The gradient of a layer from what was captured of it: rows, indexed rows and a part that came
// formed. For those who need it formed on one rank; exchanges of factors never do.
#pragma once

#include "dad/contribution.h"
#include "dad/method.h"

namespace dad {

// Where it goes: memory of the host. The first two of any floating type; the squares, Σ over the
// samples of g_s∘g_s, float32, or float64 for such a layer. Those without data are not wanted.
struct FormedLayer {
  TensorView weight;
  TensorView bias;
  TensorView weight_square;
  TensorView bias_square;
};

// Everything times `scale`. By sample or by row is what linalg/moments.h says about squares.
void FormGradient(const LayerShape& shape, const LayerInput& layer, double scale, bool by_sample,
                  const FormedLayer& formed);

}  // namespace dad
