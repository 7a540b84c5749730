// Multiples of a threshold: Strom's method, and VGC with it.
//
//   m = min(⌊|r| / τ⌋, 8);  code = sign · 8 + m - 1;  the receiver adds ± m τ;  r -= ± m τ
//   with a variance:  v = max(v - 2 |r| m τ + (m τ)², 0), with |r| as it was
//
// Without multiples m is 1 and the code is the sign alone.
#pragma once

#include <cstdint>

#include "codec/accumulate.h"
#include "codec/vgc.h"

namespace dad {

// √(mean of (c g)²), with the squares added up in an order that does not depend on the CPU: in 8
// lanes, element i in lane i mod 8, anew for each 2^16 elements; then lane by lane, then in the
// order of these sums. Not finite if a g is not.
template <typename T>
double RootMeanSquare(const T* g, int64_t count, T scale);

// Of one chunk, with r and v as Accumulate has left them; v is null without a variance.
template <typename T>
Coded EncodeStrom(float tau, bool multiples, const Selected<T>& selected, T* r, T* v);

// What the codes stand for: 16, or 2 without multiples.
template <typename T>
void StromValues(float tau, bool multiples, T* values);

}  // namespace dad
