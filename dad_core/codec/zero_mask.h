// Lossless packing of arrays with many zeros (activations after a ReLU, their gradients):
// a bitmap and the values that are not zero, where that is smaller than the array.
//
// Layout: one byte, the form. 0: the elements as they are. 1: a bit per element, the
// first in the lowest bit of the first byte, unused bits 0; then the elements whose bit is
// set. Only the bit pattern 0 is left out, so -0.0 and every NaN survive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "dad/status.h"
#include "dad/tensor_view.h"

namespace dad {

// The size that PackZeros will have, by counting; at most 1 + the raw bytes. The dtype has
// 2, 4 or 8 bytes.
size_t PackedBytes(const void* data, int64_t count, DType dtype);

// `out` has exactly PackedBytes.
void PackZeros(const void* data, int64_t count, DType dtype, std::span<std::byte> out);

// InvalidArgument if `bytes` is not a packing of `count` elements; `data` is then
// unspecified.
Status UnpackZeros(std::span<const std::byte> bytes, int64_t count, DType dtype, void* data);

}  // namespace dad
