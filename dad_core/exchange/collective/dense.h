// Dense allreduce of a tensor or a slice of it:  out = post * op_r (pre * x_r).
//
// Two forms with the same bits, since each element is reduced in rank order either way:
//   owner   2 rounds; contributions to the owner of each piece (owner_pieces.h), results
//           back: 2 n (W-1)/W elements sent per rank, whatever W
//   direct  1 round; everything to everybody, every rank reduces: n (W-1) elements sent,
//           one delay less. For what is so small that only delay counts.
// Joined ranks contribute nothing; Average divides by W all the same. With `pack` the pieces of
// the owner form travel packed (packed_piece.h), with the same bits at the end.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

enum class DenseForm { kOwner, kDirect };

std::unique_ptr<Exchange> MakeDenseExchange(const TensorSpec& spec, Slice slice, DenseForm form,
                                            bool pack = false);

}  // namespace dad
