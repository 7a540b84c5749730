// A dense tensor in int8, with error feedback on both sides: for what has no factors.
//
// The tensor is cut into one piece of whole buckets per rank; rank p owns piece p. With q(·)
// the rounding to int8 with a scale per bucket,
//
//   E_w += G_w;   C_w = q(E_w);   E_w -= C_w          every rank; each piece goes to its owner
//   S = E_o + (1/W) Σ_w C_w;   M = q(S);   E_o = S - M      each owner, sums in rank order
//
// and every rank applies M: Σ_t M + E_o + (1/W) Σ_w E_w = Σ_t mean_w G_w. Two rounds.
//
// A contribution that is not finite is flagged; then all ranks get NaN, and no state changes.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

Result<std::unique_ptr<Exchange>> MakeInt8Exchange(const TensorSpec& spec, const ExchangeEnv& env);

int64_t Int8ShareBytes(const TensorSpec& spec);

}  // namespace dad
