// For tensors that devices exchange among themselves: the ranks agree, by messages, that all have
// come, and on whose turn it is. Devices need that: operations of one communicator must be put on
// every device in the same order, while batches may overtake each other here.
//
// Round 0: everybody to everybody, nothing but "I agree". Round 1: the first member, which has
// heard all, gives the number and tells it to the others.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

std::unique_ptr<Exchange> MakeOrderExchange(const TensorSpec& spec, const ExchangeEnv& env);

}  // namespace dad
