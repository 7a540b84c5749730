// dAD (exchange/method/factor/factor.h) of a layer whose tensors are on a device: A and D are
// copied to the host and travel as there; the rows of all ranks are put together on the device, and
// cuBLAS forms the pooled product straight in the gradient's memory.
//
// Every rank repeats the product, so all of them do it here or none does: a rank cannot take part
// by way of the host. For single layers; chains (edAD) and float64 are computed on the host.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

// Whether all ranks compute it on their devices.
bool FactorOnDevice(const TensorSpec& spec, const ExchangeEnv& env);

Result<std::unique_ptr<Exchange>> MakeDeviceFactorExchange(const TensorSpec& spec,
                                                           const ExchangeEnv& env);

}  // namespace dad
