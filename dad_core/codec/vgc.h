// Values of VGC (arXiv:1802.06058) in four bits: a sign and three bits of exponent.
//
//   e_max = ⌊log₂ max |r|⌋ over what was selected of a tensor
//   2^e nearest to |r|: a mantissa of 1.5 or more rounds up
//   d = max(e_max - e, 0);  code = sign · 8 + d;  the receiver adds ± 2^(e_max - d)
//
// An element with d > 7 is not sent: r stays, v decays.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "codec/accumulate.h"

namespace dad {

// The codes of elements that are sent, as codec/sparse_code.h takes them.
struct Coded {
  std::vector<uint32_t> index;
  std::vector<uint8_t> code;
};

// e_max of all chunks of a tensor; 0 if nothing was selected.
template <typename T>
int VgcTop(std::span<const Selected<T>> chunks);

// Of one chunk, with r and v as Accumulate has left them: what is not sent goes back there, and
// with `feedback` what rounding leaves of r.
template <typename T>
Coded EncodeVgc(int e_max, T zeta, bool feedback, const Selected<T>& selected, T* r, T* v);

// What the 16 codes stand for.
template <typename T>
void VgcValues(int e_max, T* values);

}  // namespace dad
