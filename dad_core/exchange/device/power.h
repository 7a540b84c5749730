// The power iteration (exchange/method/low_rank/low_rank.h) of a layer on a device: E stays there
// with its warm start and both projections. P and Q are what is sent, so they come to the host,
// where the owner adds them up and makes U orthonormal as for layers on hosts; the wire format is
// the host's. Every rank repeats the last product on its device.
#pragma once

#include <memory>

#include "exchange/exchange.h"
#include "exchange/method/low_rank/low_rank_share.h"

namespace dad {

Result<std::unique_ptr<Exchange>> MakeDevicePowerExchange(const TensorSpec& spec,
                                                          const LowRankSettings& settings,
                                                          const ExchangeEnv& env);

}  // namespace dad
