// For tensors that devices exchange among themselves: the ranks agree, by messages, that all have
// come, and on whose turn it is. Devices need that: operations of one communicator must be put on
// every device in the same order, while batches may overtake each other here.
//
// Round 0: everybody to everybody, "I agree"; in an allgather and an alltoall with the number of
// rows that the receiver will get, since only the sender knows it. Round 1: the first member, which
// has heard all, gives the turn's number and tells it to the others. Where outputs are made now
// that their shapes are known (allgather, alltoall, reducescatter) everybody also says whether it
// has one: a device that has no place for what comes would keep the others waiting, so that if one
// has none, it is an error on all, and the turn passes.
//
//   round 0   [int64 rows]                     both sides not joined
//   round 1   [uint64 number][uint8 made]      number: of the first member; made: those kinds
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

std::unique_ptr<Exchange> MakeOrderExchange(const TensorSpec& spec, const ExchangeEnv& env);

}  // namespace dad
