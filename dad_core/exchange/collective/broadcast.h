// Broadcast: one round, in which the root sends its tensor to every rank that has not
// joined.  out_r = x_root
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

std::unique_ptr<Exchange> MakeBroadcastExchange(const TensorSpec& spec);

}  // namespace dad
