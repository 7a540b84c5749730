// int8 with feedback (exchange/method/int8/int8.h) of a tensor on a device: both residuals stay
// there, pieces are quantised, summed up in rank order and quantised again there. The bits are
// those of the host's exchange, on the wire and in the result, so a rank whose tensor comes by way
// of the host may take part.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

Result<std::unique_ptr<Exchange>> MakeDeviceInt8Exchange(const TensorSpec& spec,
                                                         const ExchangeEnv& env);

}  // namespace dad
