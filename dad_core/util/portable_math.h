// exp, tanh and erf from additions, products and divisions only, in double: libm picks
// variants by CPU whose last bits differ, and ranks have to get the same. Good to about
// 1e-15, relative for exp, absolute for the others.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace dad {

inline double PortableExp(double x) {
  if (!(x > -708.0)) return x != x ? x : 0.0;  // no subnormal results: nobody needs them here
  if (x > 709.0) return HUGE_VAL;
  // x = k ln 2 + r with ln 2 in two parts, so that r is exact to the last bit.
  const double k = std::floor(x * std::numbers::log2e + 0.5);
  const double r = (x - k * 0x1.62e42fefa0000p-1) - k * 0x1.cf79abc9e3b3ap-40;
  double sum = 1.0;
  for (int n = 13; n > 0; --n) sum = 1.0 + sum * r / n;
  return sum * std::bit_cast<double>(static_cast<uint64_t>(static_cast<int64_t>(k) + 1023) << 52);
}

inline double PortableTanh(double x) {
  const double e = PortableExp(-2.0 * std::fabs(x));
  return std::copysign((1.0 - e) / (1.0 + e), x);
}

// erf x = 2/√π e^(-x²) Σ 2ⁿ x^(2n+1) / (2n+1)!!: all terms have one sign, nothing cancels.
inline double PortableErf(double x) {
  const double square = x * x;
  if (!(square < 36.0)) return x != x ? x : std::copysign(1.0, x);
  double term = x;
  double sum = x;
  for (int n = 1; n < 200 && std::fabs(term) > 1e-17 * std::fabs(sum); ++n) {
    term *= 2.0 * square / (2 * n + 1);
    sum += term;
  }
  return 2.0 * std::numbers::inv_sqrtpi * PortableExp(-square) * sum;
}

}  // namespace dad
