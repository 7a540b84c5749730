// Lossless packing of float32 and bfloat16 values that are of similar size, as gradients are. Sign
// and mantissa are noise and go as they are; of the exponent, 8 bits, hardly 3 are news. Values
// that are zero, of which some gradients have many, take a bit. Every bit pattern survives.
//
// Layout: one byte, the form. 0: the elements as they are. 1: blocks of 64 elements, the last one
// may be short. The first byte of a block:
//   0        all of it is zero bits; nothing follows
//   1        a mask follows, a bit per element, the first in the lowest bit of the first byte,
//            unused bits 0, not all 0; then the elements whose bit is set, as a block that begins
//            with one of the bytes below
//   2...254  c; n elements with an exponent of c, c-1 or c-2, mostly:
//              n uint16   bits 0...15 of each; not with bfloat16
//              n uint8    7 bits of mantissa; the sign is the highest bit
//              n bits     bit 0 of s, laid out like the mask
//              n bits     bit 1 of s: the exponent is c-s, where s is 3 it is further away
//              bits       for each that is, in order: v as its number of bits less one in zeros, a
//                         one, and its bits below the highest, lowest first. v-1 is 2(c-3-e) for an
//                         exponent e below the three, else 2(e-c-1)+1. Unused bits are 0
//   255      the elements as they are
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "dad/status.h"
#include "dad/tensor_view.h"

namespace dad {

// float32 and bfloat16.
bool CanPackFloats(DType dtype);

// What PackFloats needs to work in; more than it gives back.
size_t PackFloatsRoom(int64_t count, DType dtype);

// Returns how many bytes of `out` are the packing: at most 1 + the raw bytes. `data` needs no
// alignment.
size_t PackFloats(const void* data, int64_t count, DType dtype, std::span<std::byte> out);

// InvalidArgument if `bytes` is not a packing of `count` elements; `data` is then unspecified.
Status UnpackFloats(std::span<const std::byte> bytes, int64_t count, DType dtype, void* data);

}  // namespace dad
