// Adasum (Maleki et al., 2021) for dense floating tensors. Two gradients are combined by
//   a + b  ->  (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b
// which is their sum when they are orthogonal and their average when they are equal. More
// are combined in a tree of pairs in rank order: (0,1) (2,3) ..., then pairs of those; an
// odd one passes. A zero gradient, such as that of a joined rank, leaves the other as it is.
//
// Rounds, with L = ceil(log2 W) levels of the tree:
//   0          contributions to the owners of the pieces (owner_pieces.h)
//   1 .. L     a.b, |a|^2, |b|^2 of each pair, summed over pieces: every rank sends those of
//              its piece to all, adds them in rank order and combines its piece of the pair
//   L + 1      results to all
// All ranks use the same dot products and each piece is combined by one owner: same bits.
// The tree is computed in double and rounded once, to the tensor's type.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

std::unique_ptr<Exchange> MakeAdasumExchange(const TensorSpec& spec);

}  // namespace dad
