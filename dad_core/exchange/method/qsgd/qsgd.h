// QSGD: a dense tensor rounded at random to few levels, so that the mean of what is sent is the
// gradient.
//
// With L = 2^(bits-1) - 1 levels on each side of zero and s the largest |x| of a bucket of 512
// elements,
//
//   q = ⌊L x / s + u⌋,  u uniform in [0, 1);   x is taken for s q / L
//
// (bits = 1: q = ⌊(x / s + 1) / 2 + u⌋, x is taken for s (2 q - 1)). In double; s is float32,
// rounded up. u is a function of (seed, name of the tensor, step, rank, element), so a run can be
// repeated:
//
//   u = (mix(key + element · 0x9E3779B97F4A7C15) >> 11) · 2^-53
//   key = mix(mix(mix(seed ^ hash(name)) + step) + rank),  mix: the finaliser of SplitMix64
//
// One round: a rank's share goes to all, and all add in rank order; Average divides the sum by W. A
// share is
//   u8 flags (1: not finite)  f32 s for each bucket  q + L in `bits` bits each, the first in the
//   lowest bits
//
// Nothing is kept but the number of the step. A contribution that is not finite gives NaN on all
// ranks.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

// Method: `qsgd;bits=4;seed=0`.
Result<std::unique_ptr<Exchange>> MakeQsgdExchange(const TensorSpec& spec, const ExchangeEnv& env);

// Of one share.
int64_t QsgdShareBytes(const TensorSpec& spec);

}  // namespace dad
