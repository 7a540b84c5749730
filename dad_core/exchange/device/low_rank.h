// rank-dAD (exchange/low_rank.h) of a layer on a device, `owner` and `gather` with the dense
// residual: E stays there. E += Dᵀ A, what was sent leaves it, and the two products of a pass, P =
// E V and Q = Eᵀ P, are cuBLAS's. P and Q are as small as what is sent: they come to the host,
// which finishes the iteration, rounds to the wire and sends as for a layer of its own. The result
// is formed on the device.
//
// Every rank repeats that last product, so all do it here or none, as in factor.h. float64,
// `power`, an energy, no feedback and feedback by rows are computed on the host.
#pragma once

#include <memory>

#include "exchange/exchange.h"
#include "exchange/method.h"

namespace dad {

// Whether all ranks compute it on their devices.
bool LowRankOnDevice(const TensorSpec& spec, const MethodText& method, const ExchangeEnv& env);

Result<std::unique_ptr<Exchange>> MakeDeviceLowRankExchange(const TensorSpec& spec,
                                                            const MethodText& method,
                                                            const ExchangeEnv& env);

}  // namespace dad
