// Allgather: one round, in which every rank sends its rows and their number to every
// rank that has not joined.
//   out = [ x_0 ; x_1 ; ... ; x_{W-1} ]   along the first dimension, which may differ
// Joined ranks have no rows; a tensor without dimensions is one row.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

std::unique_ptr<Exchange> MakeGatherExchange(const TensorSpec& spec);

}  // namespace dad
