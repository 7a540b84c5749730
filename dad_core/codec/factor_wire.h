// Factors as they travel: a k×n matrix, one direction per row.
//
//   fp32   the values; of a double tensor 8 bytes each, so that exact stays exact
//   bf16   the values, rounded to nearest, ties to even
//   int8   per direction: a float32 scale, then n values in -127..127
//   int4   per direction: a float32 scale, then values in -7..7, two per byte, the first
//          in the low half; an odd count leaves the last half 0
//
// A value of an int format is integer · scale. A direction that is zero, or too small for
// a normal float as scale, has scale 0; one that is not finite has scale NaN and decodes
// to NaN throughout. Little endian. The bits depend on no CPU level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "dad/status.h"
#include "dad/tensor_view.h"
#include "linalg/matrix.h"

namespace dad {

enum class Wire : uint8_t { kFp32 = 0, kBf16, kInt8, kInt4 };
inline constexpr int kNumWires = 4;

const char* Name(Wire wire);  // "int8"
Result<Wire> ParseWire(std::string_view name);

// dtype: kFloat64 for a double tensor; all others travel as float.
size_t EncodedBytes(Wire wire, int64_t k, int64_t n, DType dtype);

// `out` has exactly EncodedBytes. `decoded`, unless it has no rows, gets what the receivers
// will decode, bit for bit: what a sender with error feedback subtracts. It may be x.
template <typename T>
void EncodeFactors(Wire wire, MatrixView<const T> x, std::span<std::byte> out,
                   std::type_identity_t<MatrixView<T>> decoded = {});

// InvalidArgument if `bytes` is not the encoding of a matrix of x's size; x is then
// unspecified.
template <typename T>
Status DecodeFactors(Wire wire, std::span<const std::byte> bytes, MatrixView<T> x);

}  // namespace dad
