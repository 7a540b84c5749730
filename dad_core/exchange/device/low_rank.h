// rank-dAD (exchange/method/low_rank/low_rank.h) of a layer on a device, `owner` and `gather`
// (power.h has the third), with the dense residual or none: E stays there, and so do the iteration
// (subspace.h), its warm start, the rounding to the wire and what is left (low_rank_side.h). All
// passes of a step are put on the stream at once, and only the encoded directions come to the host.
// Factors of other ranks are checked and decoded there, by the decoder that fuzzing knows, and go
// to the device as values: that takes microseconds, and no kernel has to look for bytes that are
// out of range.
//
// The wire format is the host's. Every rank repeats the last product, so all do it here or none,
// as in factor.h; a rank's own factors are what the others decode, bit for bit. float64
// and feedback by rows are computed on the host. Without feedback few rows are taken as they are,
// as on the host; of more G is formed.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

// Whether all ranks compute it on their devices.
bool LowRankOnDevice(const TensorSpec& spec, const ExchangeEnv& env);

Result<std::unique_ptr<Exchange>> MakeDeviceLowRankExchange(const TensorSpec& spec,
                                                            const ExchangeEnv& env);

}  // namespace dad
