// A run of values as small integers times one scale; what the int formats have in common.
// The loops are compiled for several CPU levels and give the same bits at each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dad {

// The scale with which the largest of |x| becomes `limit`: 0 if that would not be a normal
// float, NaN if an x is not finite or too large.
template <typename T>
float ScaleOfRun(const T* x, int64_t count, int limit);

// out[i] = x[i] / scale, rounded to nearest (ties to even), in -limit..limit; all 0 if the
// scale is 0 or NaN.
template <typename T>
void RunToInts(const T* x, int64_t count, float scale, int limit, int8_t* out);

// x[i] = scale in[i], or x[i] += with `add`.
template <typename T>
void IntsToRun(const int8_t* in, int64_t count, float scale, bool add, T* x);

// Whether ScaleOfRun could have given it.
bool IsScale(float scale);

// Whether all are in -limit..limit.
bool IntsAreWithin(const int8_t* in, int64_t count, int limit);

}  // namespace dad
