// The derivatives of activations, applied to the gradient that comes from above.
#pragma once

#include <cstdint>

#include "dad/contribution.h"

namespace dad {

// Whether φ' follows from the activation's output y; else it needs its input h.
bool DerivativeFromOutput(Activation activation);
// Whether φ' is one of two values, told by one bit: whether y is at most 0 or not.
bool DerivativeIsOneBit(Activation activation);

// d[i] *= φ'(·), told by y for those of DerivativeFromOutput, else by h.
template <typename T>
void MultiplyByDerivative(Activation activation, double slope, const T* y_or_h, int64_t count,
                          T* d);

// The same from bits: bit i, counted from the lowest of bits[0], says that y[i] is not at most 0.
template <typename T>
void MultiplyByBits(Activation activation, double slope, const uint8_t* bits, int64_t count, T* d);

}  // namespace dad
