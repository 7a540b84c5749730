// Reducescatter: one round, in which each rank gets everybody's values for its rows and
// reduces them in rank order:
//   out_p = post * op_r (pre * x_r[rows of p])
// Of n rows rank p has n/W, the n mod W lowest ranks one more. Rows of a joined rank go
// nowhere.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

std::unique_ptr<Exchange> MakeReduceScatterExchange(const TensorSpec& spec);

}  // namespace dad
