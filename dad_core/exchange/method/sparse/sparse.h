// The sparse family: an element is sent when it is worth it, the others wait in r.
//
//   vgc        (arXiv:1802.06058)  r += Σ_s g_s;  v += Σ_s g_s²       over the samples s
//              r² > α v:  sends r as a power of two;  r = v = 0      else:  v = ζ v
//   vgc_strom  |r| > τ and r² > α v:  sends m τ, m = min(⌊|r|/τ⌋, 8) with r's sign;
//              v = max(v - 2|r|mτ + (mτ)², 0);  r -= ±mτ             else:  v = ζ v
//   strom      |r| > τ:  the same without v
//   topk       the ⌈ratio · n⌉ largest |r|, in float32 (double);  r = 0 there
//
// vgc's power of two: e_max = ⌊log₂ max |r|⌋ over what passes the test; with 2^e nearest to |r| (a
// mantissa of 1.5 or more rounds up), d = max(e_max - e, 0) goes over the wire in 3 bits. An
// element with d > 7 is not sent after all. With feedback=1 what rounding leaves stays in r, else
// it is dropped. τ is tau · a, with a = 0.9 a + 0.1 RMS(g) (the first: RMS(g)) in double, rounded
// to float32; or `tau_absolute`, for which m is 1. RMS(g) adds up squares in double in 8 lanes
// (element i in lane i mod 8), for each 2^16 elements anew, then lanes in order, then these sums in
// order. Tests are made in double; r and v are float32 (float64 for such tensors), v at most the
// largest finite.
//
// A layer has two tensors, weight and bias, each with its own e_max or τ. One round: every rank's
// share goes to all, and all add in rank order; Average divides the sum by W. A share:
//
//   u8 flags (1: not finite, 2: wants a plan, 4: nothing is sent, the share would be larger than
//   dense) then, unless flag 1 or 4 is set, for weight and bias:
//     vgc: i16 e_max    strom, vgc_strom: f32 τ    topk: nothing
//     the elements, in chunks of 2^28, as codec/sparse_code.h has them: 4 bits are the sign, then d
//     or m - 1; with tau_absolute the sign alone. topk has no code, but the values after the
//     indices.
//
// A contribution that is not finite is flagged; then all ranks get NaN, and no state changes. To
// that end a step works on copies of r and v, which take their places once all shares are there.
//
// Kept between steps: r; and v by vgc and vgc_strom.
#pragma once

#include <memory>

#include "exchange/exchange.h"
#include "exchange/method_table.h"

namespace dad {

// Method:
// `sparse;rule=vgc;alpha=1.0;zeta=0.999;variance=row;coding=rice;feedback=0;layer=OUTxIN:bias`. The
// variance is over rows or over samples (contribution.h).
Result<std::unique_ptr<Exchange>> MakeSparseExchange(const TensorSpec& spec,
                                                     const ExchangeEnv& env);

// What a share will have, roughly.
int64_t SparseShareBytes(const TensorSpec& spec);

// vgc and vgc_strom need them.
Result<Squares> SparseSquares(const Method& method);

}  // namespace dad
