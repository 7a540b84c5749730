// Values rounded at random to few levels, in buckets with a scale each: QSGD (arXiv:1610.02132)
// with the largest magnitude as the norm. exchange/method/qsgd/qsgd.h has the equations.
//
// Layout: a float32 scale per bucket of kQsgdBucket elements, then `bits` bits per element, the
// first in the lowest bits of the first byte; unused bits are 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "dad/status.h"

namespace dad {

inline constexpr int64_t kQsgdBucket = 512;

size_t QsgdBytes(int64_t count, int bits);

// What the random numbers of one step depend on.
uint64_t QsgdKey(uint64_t seed, std::string_view name, int64_t step, int rank);

// `out` has exactly QsgdBytes. False if a value, times `factor`, is not finite or beyond the range
// of a float.
template <typename T>
bool EncodeQsgd(const T* x, int64_t count, T factor, int bits, uint64_t key,
                std::span<std::byte> out);

// InvalidArgument if `bytes` is no such encoding.
Status CheckQsgd(std::span<const std::byte> bytes, int64_t count, int bits);

// Adds the values to `sum`. InvalidArgument if `bytes` is no such encoding; `sum` is then
// unspecified.
template <typename T>
Status AddQsgd(std::span<const std::byte> bytes, int64_t count, int bits, T* sum);

}  // namespace dad
