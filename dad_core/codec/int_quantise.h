// A tensor in int8 with one float32 scale per bucket: for what has no factors.
//
// Layout: a scale per bucket, then a byte per element. An element is integer · scale,
// with integers in -127..127. A bucket that is zero, or too small for a normal float as
// scale, has scale 0; one that is not finite has scale NaN and decodes to NaN throughout.
// The bits depend on no CPU level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "dad/status.h"

namespace dad {

// bucket: elements per scale, at least 1; the last bucket may be shorter.
size_t QuantisedBytes(int64_t count, int64_t bucket);

// `out` has exactly QuantisedBytes. `decoded`, unless null, gets what receivers will
// decode, bit for bit; it may be x. T is float or double.
template <typename T>
void QuantiseInt8(const T* x, int64_t count, int64_t bucket, std::span<std::byte> out,
                  T* decoded = nullptr);

// InvalidArgument if `bytes` is not an encoding of `count` elements in such buckets.
Status CheckInt8(std::span<const std::byte> bytes, int64_t count, int64_t bucket);

// The same error; x is then unspecified.
template <typename T>
Status DequantiseInt8(std::span<const std::byte> bytes, int64_t count, int64_t bucket, T* x);

// The same, added to x: decoding and summing over ranks in one pass. On an error x is
// unchanged.
template <typename T>
Status AddDequantisedInt8(std::span<const std::byte> bytes, int64_t count, int64_t bucket, T* x);

}  // namespace dad
