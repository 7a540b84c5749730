#include "codec/vgc.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace dad {
namespace {

constexpr int kSign = 8;
constexpr int kMost = 7;

// ⌊log₂ |x|⌋ for a finite x that is not 0, and whether |x| / 2^that is 1.5 or more.
struct Exponent {
  int floor;
  bool upper_half;
};

Exponent ExponentOf(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const int biased = static_cast<int>((bits >> 23) & 0xff);
  if (biased != 0) return {biased - 127, ((bits >> 22) & 1) != 0};
  const int floor = std::ilogb(x);
  return {floor, std::ldexp(static_cast<double>(std::fabs(x)), -floor) >= 1.5};
}

Exponent ExponentOf(double x) {
  const int floor = std::ilogb(x);
  return {floor, std::fabs(std::scalbn(x, -floor)) >= 1.5};
}

}  // namespace

template <typename T>
int VgcTop(std::span<const Selected<T>> chunks) {
  T largest = 0;
  for (const Selected<T>& chunk : chunks) {
    for (T r : chunk.r) largest = std::max(largest, std::fabs(r));
  }
  return largest == T(0) ? 0 : ExponentOf(largest).floor;
}

template <typename T>
Coded EncodeVgc(int e_max, T zeta, bool feedback, const Selected<T>& selected, T* r, T* v) {
  T values[16];
  VgcValues(e_max, values);
  Coded coded;
  coded.index.reserve(selected.index.size());
  coded.code.reserve(selected.index.size());
  for (size_t k = 0; k < selected.index.size(); ++k) {
    const uint32_t i = selected.index[k];
    const Exponent e = ExponentOf(selected.r[k]);
    const int d = std::max(e_max - e.floor - (e.upper_half ? 1 : 0), 0);
    if (d > kMost) {
      r[i] = selected.r[k];
      v[i] = selected.v[k] * zeta;
      continue;
    }
    const int code = d + (std::signbit(selected.r[k]) ? kSign : 0);
    coded.index.push_back(i);
    coded.code.push_back(static_cast<uint8_t>(code));
    if (feedback) r[i] = selected.r[k] - values[code];
  }
  return coded;
}

template <typename T>
void VgcValues(int e_max, T* values) {
  for (int d = 0; d <= kMost; ++d) {
    values[d] = std::ldexp(T(1), e_max - d);
    values[d + kSign] = -values[d];
  }
}

#define DAD_INSTANTIATE(T)                                               \
  template int VgcTop<T>(std::span<const Selected<T>>);                  \
  template Coded EncodeVgc<T>(int, T, bool, const Selected<T>&, T*, T*); \
  template void VgcValues<T>(int, T*)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
