// Finds out whether values are finite in a loop that does something else with them. It costs an
// integer "or" per value, which the compiler vectorises at every CPU level.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace dad {

template <typename T>
class FiniteCheck {
 public:
  [[gnu::always_inline]] void See(T x) { seen_ |= (std::bit_cast<Bits>(x) & kMagnitude) + kOne; }
  bool all_finite() const { return (seen_ & kSign) == 0; }

 private:
  static_assert(std::numeric_limits<T>::is_iec559);
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  static constexpr Bits kSign = Bits{1} << (8 * sizeof(T) - 1);
  static constexpr Bits kMagnitude = kSign - 1;
  // Added to the largest exponent, which is that of NaN and infinity, it carries into the sign.
  static constexpr Bits kOne = Bits{1} << (std::numeric_limits<T>::digits - 1);

  Bits seen_ = 0;
};

}  // namespace dad
