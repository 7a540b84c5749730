#include "codec/topk.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <type_traits>

namespace dad {
namespace {

constexpr int kDigitBits = 11;

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

template <typename T>
Bits<T> Magnitude(T x) {
  return std::bit_cast<Bits<T>>(x) & (std::numeric_limits<Bits<T>>::max() >> 1);
}

}  // namespace

template <typename T>
TopKLimit FindTopK(const T* r, int64_t count, int64_t k) {
  if (k <= 0) return {std::numeric_limits<uint64_t>::max(), 0};
  if (k >= count) return {0, 0};
  // Digit by digit from the top: the k-th largest has the digits found so far, and `k` counts
  // among those that share them.
  Bits<T> prefix = 0;
  int shift = static_cast<int>(sizeof(T)) * 8;
  while (shift > 0) {
    const int width = std::min(kDigitBits, shift);
    const int low = shift - width;
    std::array<int64_t, 1 << kDigitBits> counts{};
    const Bits<T> mask = (Bits<T>{1} << width) - 1;
    for (int64_t i = 0; i < count; ++i) {
      const Bits<T> bits = Magnitude(r[i]);
      const bool shares = shift >= static_cast<int>(sizeof(T)) * 8 || bits >> shift == prefix;
      counts[static_cast<size_t>((bits >> low) & mask)] += shares ? 1 : 0;
    }
    size_t digit = static_cast<size_t>(mask);
    while (counts[digit] < k) k -= counts[digit--];
    prefix = static_cast<Bits<T>>(prefix << width | digit);
    shift = low;
  }
  return {prefix, prefix == 0 ? 0 : k};
}

template <typename T>
void TakeTopK(const T* r, int64_t count, TopKLimit& limit, std::vector<uint32_t>& index,
              std::vector<T>& value) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = Magnitude(r[i]);
    if (bits < limit.magnitude || bits == 0) continue;
    if (bits == limit.magnitude && limit.equal-- <= 0) continue;
    index.push_back(static_cast<uint32_t>(i));
    value.push_back(r[i]);
  }
}

template TopKLimit FindTopK<float>(const float*, int64_t, int64_t);
template TopKLimit FindTopK<double>(const double*, int64_t, int64_t);
template void TakeTopK<float>(const float*, int64_t, TopKLimit&, std::vector<uint32_t>&,
                              std::vector<float>&);
template void TakeTopK<double>(const double*, int64_t, TopKLimit&, std::vector<uint32_t>&,
                               std::vector<double>&);

}  // namespace dad
