// Dense allreduce of a large tensor, or a slice of it, around a ring:  out = post * op_r (pre *
// x_r).
//
// The elements are cut into one piece per rank. In round t of 2 (W-1), rank i sends
// piece i-t (mod W) to rank i+1 and nothing to anybody else. In the first W-1 rounds what it
// sends is what ranks i-t .. i make of the piece, in this order; the rank that adds last
// scales. In the others the finished piece goes on as it is: all ranks have the bytes of
// the last adder.
//
// As many bytes as by owners (dense.h), 2 n (W-1)/W elements sent per rank, in more hops. But
// a line carries one connection each way: no two ranks send to a third at the same time, so that
// nothing is lost on the way and no connection falls behind another.
//
// A sum is rounded after each hop, in the type that travels. So it is for float32 and
// float64, which owners add up in their own type, too. The order of addition depends on the
// piece that an element is in, so the last bits are not those of owners.
//
// Joined ranks contribute nothing and pass on; Average divides by W all the same. With `pack`
// pieces travel packed (packed_piece.h), with the same bits at the end; a finished one goes on as
// it came.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

// Rounds are numbered in one byte of a message.
inline constexpr int kMaxRingSize = 128;
// Where a ring is of use at all, it is from so many bytes per rank on.
inline constexpr int64_t kRingBytesPerRank = 1 << 20;

bool CanGoRound(const TensorSpec& spec);

std::unique_ptr<Exchange> MakeDenseRingExchange(const TensorSpec& spec, Slice slice,
                                                bool pack = false);

}  // namespace dad
