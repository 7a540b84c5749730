// Elementwise reduction of all ranks' values, in one pass over memory.
//
//   out[i] = postscale * op over r in rank order of (prescale * input_r[i])
//
// The result is a function of the inputs alone: elements are combined in rank order,
// nothing is reassociated or contracted, so every CPU level and every cut into slices
// gives the same bits.
//
//   float32, float64   in their own type; Average divides the sum by group_size
//   float16, bfloat16  in float, rounded once at the end (nearest, ties to even)
//   integers           in 64 bits, wrapped into the type at the end; Average is floor
//                      division; scaling goes through double and truncates
//   bool               as the integers 0 and 1, non-zero is true: Sum and Max are "or",
//                      Product and Min are "and", Average is true if all are
//
// Min and Max of floats give NaN if any input is NaN.
#pragma once

#include <cstdint>
#include <span>

#include "dad/request.h"
#include "dad/tensor_view.h"
#include "linalg/cpu_level.h"

namespace dad {

// `inputs` are in rank order; null is a rank that contributes nothing. If all are null
// the result is zero. No alignment is needed. `out` may be one of the inputs, but must
// not overlap them in another way. Adasum is not elementwise and not served here.
//
// False if an element of a Sum or Average of floats is NaN or infinite, before it is rounded to 16
// bits. True for everything else.
bool ReduceInRankOrder(std::span<const void* const> inputs, void* out, int64_t count, DType dtype,
                       ReduceOp op, double prescale, double postscale, int group_size);

// The same at a level the machine must have; for tests that compare levels.
bool ReduceInRankOrderAt(CpuLevel level, std::span<const void* const> inputs, void* out,
                         int64_t count, DType dtype, ReduceOp op, double prescale, double postscale,
                         int group_size);

// After ReduceInRankOrder has returned false: the first input that has NaN or infinity, -1 if none
// has. An input that was overwritten by the result comes last, and is blamed if no other is found.
int FirstNotFinite(std::span<const void* const> inputs, const void* out, int64_t count,
                   DType dtype);

}  // namespace dad
