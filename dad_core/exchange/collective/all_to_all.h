// Alltoall: one round, in which rank r sends rows of its tensor to each rank p:
//   out_p = [ x_0 rows for p ; x_1 rows for p ; ... ]
// How many go where is `splits`, or the same number to all if it is empty. The receiver
// learns the numbers with the rows. Joined ranks send no rows and get none.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

std::unique_ptr<Exchange> MakeAllToAllExchange(const TensorSpec& spec);

}  // namespace dad
