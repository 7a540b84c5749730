// The loops of Adasum, in double. Each result is computed by one rank and sent to the
// others, so nothing here has to give the same bits elsewhere.
#pragma once

#include <cstdint>

#include "dad/tensor_view.h"

namespace dad {

struct PairDots {
  double ab = 0;
  double aa = 0;
  double bb = 0;
};

PairDots Dots(const double* a, const double* b, int64_t count);

// a = (1 - ab / (2 aa)) a + (1 - ab / (2 bb)) b; a zero vector leaves the other as it is.
void CombineAdasum(double* a, const double* b, int64_t count, const PairDots& dots);

// Floating dtypes only. `from` may lie at any address; null means zeros.
void ScaleToDouble(const void* from, double* to, int64_t count, DType dtype, double scale);
void ScaleFromDouble(const double* from, void* to, int64_t count, DType dtype, double scale);

}  // namespace dad
