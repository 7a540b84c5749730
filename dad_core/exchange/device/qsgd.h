// QSGD (exchange/method/qsgd/qsgd.h) of a tensor on a device: values are rounded there, shares of
// all ranks are added up there in rank order. The bits are those of the host's exchange, on the
// wire and in the result, so a rank whose tensor comes by way of the host may take part.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

Result<std::unique_ptr<Exchange>> MakeDeviceQsgdExchange(const TensorSpec& spec,
                                                         const ExchangeEnv& env);

}  // namespace dad
