// rank-dAD: low-rank factors of the gradient (arXiv:2102.09631), with error feedback.
//
// A rank sends the best r directions of its residual. With a dense residual, and with wire(·) as
// the rounding to the wire format:
//
//   E_w += D_wᵀ A_w
//   C_w  = wire(top_r(E_w));   E_w -= C_w
//   owner:   S = E_o + (1/W) Σ_w C_w;   M = wire(top_r(S));   E_o = S - M
//   every rank applies M, and     Σ_t M + E_o + (1/W) Σ_w E_w = Σ_t mean_w G_w
//
//   owner    two rounds: C_w to the layer's owner, M from it. 2 (W-1)/W r (m+n) values, whatever
//            W is. All decode the owner's bytes: same bits.
//   gather   one round: C_w to all, and all apply (1/W) Σ_w C_w. (W-1) r (m+n) values.
//   power    four rounds: P = (1/W) Σ E_w V; U = orth(P); Q = (1/W) Σ E_wᵀ U; all apply U Qᵀ.
//            The sums are formed by the owner. The PowerSGD iteration, in fp32.
//
// Without feedback the same with no residual; from rows, G is never formed.
//
// A contribution that is not finite is flagged; then all ranks get NaN, and no state changes.
// A joined rank contributes nothing, serves as owner, and keeps its residual.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

Result<std::unique_ptr<Exchange>> MakeLowRankExchange(const TensorSpec& spec,
                                                      const ExchangeEnv& env);

// Bytes of one set of factors.
int64_t LowRankShareBytes(const TensorSpec& spec);

}  // namespace dad
