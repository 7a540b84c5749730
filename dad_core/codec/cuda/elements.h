// What the codecs do with one element, for the host and for CUDA devices. Tests compare each with
// the CPU's code bit for bit, on the host; device code is compiled without contraction
// (--fmad=false), so that the operations are the same ones.
//
// C++17, and no headers of the core: nvcc of CUDA 12 and 13 compiles it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DAD_HD __host__ __device__ inline
#else
#define DAD_HD inline
#endif

namespace dad::cuda {

template <typename To, typename From>
DAD_HD To BitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// ---- Layout of floating point numbers.

template <typename T>
struct Format;
template <>
struct Format<float> {
  using Word = uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr int kBias = 127;
};
template <>
struct Format<double> {
  using Word = unsigned long long;  // as atomicMax wants it
  static constexpr int kMantissa = 52;
  static constexpr int kBias = 1023;
};
// Not numeric_limits: its functions are the host's.
template <typename T>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float kLargest = 3.402823466385288598e+38f;
  static constexpr float kLeastNormal = 1.175494350822287508e-38f;
};
template <>
struct Limits<double> {
  static constexpr double kLargest = 1.7976931348623157e+308;
};
template <typename T>
using Word = typename Format<T>::Word;

// The quiet NaN that the host's numeric_limits gives.
template <typename T>
DAD_HD T NotANumber() {
  using F = Format<T>;
  return BitsAs<T>(static_cast<Word<T>>(4 * F::kBias + 3) << (F::kMantissa - 1));
}

// Bits without the sign: they order like the magnitudes, NaN above infinity.
template <typename T>
DAD_HD Word<T> MagnitudeBits(T x) {
  return BitsAs<Word<T>>(x) & (~Word<T>{0} >> 1);
}

// ⌊log₂ |x|⌋ for a finite x that is not 0, and whether |x| / 2^that is 1.5 or more.
struct Exponent {
  int floor;
  bool upper_half;
};
template <typename T>
DAD_HD Exponent ExponentOf(T x) {
  using F = Format<T>;
  const Word<T> magnitude = MagnitudeBits(x);
  const int biased = static_cast<int>(magnitude >> F::kMantissa);
  if (biased != 0) return {biased - F::kBias, ((magnitude >> (F::kMantissa - 1)) & 1) != 0};
  int top = 0;  // subnormal: its highest bit says it
  while ((magnitude >> top) > 1) ++top;
  return {1 - F::kBias - F::kMantissa + top, top > 0 && ((magnitude >> (top - 1)) & 1) != 0};
}

// 2^e, rounded like ldexp(1, e).
template <typename T>
DAD_HD T PowerOfTwo(int e) {
  using F = Format<T>;
  constexpr int kLeast = 1 - F::kBias;
  if (e > F::kBias) return BitsAs<T>(static_cast<Word<T>>(2 * F::kBias + 1) << F::kMantissa);
  if (e >= kLeast) return BitsAs<T>(static_cast<Word<T>>(e + F::kBias) << F::kMantissa);
  if (e >= kLeast - F::kMantissa) return BitsAs<T>(Word<T>{1} << (e - kLeast + F::kMantissa));
  return T(0);
}

// ---- float16 and bfloat16 as they lie in memory; the results of util/half.h.

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

DAD_HD float ToFloat(Half half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
  const uint32_t exponent = (half.bits >> 10) & 0x1fu;
  const uint32_t mantissa = half.bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return BitsAs<float>(sign | BitsAs<uint32_t>(magnitude));
  }
  if (exponent == 0x1f) {
    return BitsAs<float>(sign | 0x7f800000u | (mantissa != 0 ? 0x400000u : 0u) | (mantissa << 13));
  }
  return BitsAs<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

DAD_HD Half ToHalf(float value) {
  const auto bits = BitsAs<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Adding 0.5 puts the unit of the result at the last bit of a float: the addition rounds.
    half = BitsAs<uint32_t>(BitsAs<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

DAD_HD float ToFloat(BFloat16 value) {
  return BitsAs<float>(static_cast<uint32_t>(value.bits) << 16);
}

DAD_HD BFloat16 ToBFloat16(float value) {
  const auto bits = BitsAs<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded)};
}

// From one type in memory to another, by way of float, or of double where both are.
DAD_HD float Widen(Half x) { return ToFloat(x); }
DAD_HD float Widen(BFloat16 x) { return ToFloat(x); }
DAD_HD float Widen(float x) { return x; }
DAD_HD double Widen(double x) { return x; }
template <typename Wide>
DAD_HD void Narrow(Wide x, Half* out) {
  *out = ToHalf(static_cast<float>(x));
}
template <typename Wide>
DAD_HD void Narrow(Wide x, BFloat16* out) {
  *out = ToBFloat16(static_cast<float>(x));
}
template <typename Wide>
DAD_HD void Narrow(Wide x, float* out) {
  *out = static_cast<float>(x);
}
template <typename Wide>
DAD_HD void Narrow(Wide x, double* out) {
  *out = static_cast<double>(x);
}

// ---- Small integers times a scale (codec/int_run.h).

// From the largest magnitude's bits.
template <typename T>
DAD_HD float ScaleOf(Word<T> largest_bits, int limit) {
  constexpr float kLargest = Limits<float>::kLargest;
  constexpr float kLeastNormal = Limits<float>::kLeastNormal;
  const T scale = BitsAs<T>(largest_bits) / static_cast<T>(limit);
  if (!(scale <= static_cast<T>(kLargest))) return BitsAs<float>(uint32_t{0x7fc00000});
  auto rounded = static_cast<float>(scale);
  // limit · scale must not have been rounded up to infinity.
  if (static_cast<float>(limit) * rounded > kLargest) {
    rounded = BitsAs<float>(BitsAs<uint32_t>(rounded) - 1);
  }
  return rounded >= kLeastNormal ? rounded : 0.0f;
}

// x times `inverse`, rounded to nearest, ties to even, in -limit..limit.
template <typename T>
DAD_HD int ToInt(T x, T inverse, int limit) {
  constexpr T kRound = sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0);  // 1.5 · 2^23, 2^52
  const T rounded = (x * inverse + kRound) - kRound;
  const auto q = static_cast<int32_t>(rounded);
  return q > limit ? limit : q < -limit ? -limit : q;
}

// Two integers of four bits, the first in the low half.
DAD_HD uint8_t PackNibbles(int low, int high) {
  return static_cast<uint8_t>((low & 15) | ((high & 15) << 4));
}

// ---- The pass of the sparse methods (codec/accumulate.h).

template <typename T>
struct Rule {
  T tau;
  double alpha;
  T zeta;
};

// A τ that is known only on the device.
template <typename T>
struct Threshold {
  float tau;  // as it travels
  T least;    // what is larger passes
};
// Without a τ there has been no gradient, and nothing passes.
template <typename T>
DAD_HD Threshold<T> ThresholdOf(float tau) {
  constexpr auto kInfinity = static_cast<Word<T>>(2 * Format<T>::kBias + 1) << Format<T>::kMantissa;
  return {tau, tau == 0 ? BitsAs<T>(Word<T>{kInfinity}) : static_cast<T>(tau)};
}

template <typename T>
struct Accumulated {
  T r;
  T v;
  bool selected;
  bool finite;
};

// `squares`: this step's Σ g², or nothing to take the square of c g.
template <typename T>
DAD_HD Accumulated<T> AccumulateElement(const Rule<T>& rule, T g, T scale, const T* squares, T r,
                                        const T* v) {
  constexpr T kLargest = Limits<T>::kLargest;
  Accumulated<T> out{};
  const T x = g * scale;
  out.r = r + x;
  out.finite = out.r - out.r == T(0);
  out.selected = (out.r < T(0) ? -out.r : out.r) > rule.tau;
  if (v != nullptr) {
    const T more = squares != nullptr ? *squares * (scale * scale) : x * x;
    const T sum = *v + more;
    out.v = sum < kLargest ? sum : kLargest;
    const auto wide = static_cast<double>(out.r);
    out.selected = out.selected && wide * wide > rule.alpha * static_cast<double>(out.v);
  }
  return out;
}

// ---- Codes of four bits (codec/vgc.h, codec/strom.h).

constexpr int kSignCode = 8;

// 0..15, or -1: too small to be sent.
template <typename T>
DAD_HD int VgcCode(int e_max, T r) {
  const Exponent e = ExponentOf(r);
  const int below = e_max - e.floor - (e.upper_half ? 1 : 0);
  const int d = below > 0 ? below : 0;
  if (d > 7) return -1;
  const bool negative = BitsAs<Word<T>>(r) != MagnitudeBits(r);
  return d + (negative ? kSignCode : 0);
}

template <typename T>
DAD_HD T VgcValue(int e_max, int code) {
  const T value = PowerOfTwo<T>(e_max - (code & 7));
  return (code & kSignCode) != 0 ? -value : value;
}

template <typename T>
struct StromSent {
  int code;
  T r;
  T v;
};
template <typename T>
DAD_HD StromSent<T> StromElement(float tau, bool multiples, T r, const T* v) {
  const bool negative = BitsAs<Word<T>>(r) != MagnitudeBits(r);
  const auto size = static_cast<double>(BitsAs<T>(MagnitudeBits(r)));
  const double quotient = size / static_cast<double>(tau);
  const int most = multiples ? 8 : 1;
  const int m = quotient >= most ? most : quotient < 1 ? 1 : static_cast<int>(quotient);
  const T sent = static_cast<T>(m) * static_cast<T>(tau);
  StromSent<T> out{};
  out.code = multiples ? m - 1 + (negative ? kSignCode : 0) : static_cast<int>(negative);
  out.r = negative ? r + sent : r - sent;
  if (v != nullptr) {
    const auto wide = static_cast<double>(sent);
    const double left = static_cast<double>(*v) - 2 * size * wide + wide * wide;
    out.v = static_cast<T>(left > 0.0 ? left : 0.0);
  }
  return out;
}

// ---- Words (codec/sparse_code.h).

DAD_HD uint32_t WordOf(uint32_t index, int code, int value_bits) {
  return value_bits == 0 ? index : index | static_cast<uint32_t>(code) << (32 - value_bits);
}
DAD_HD uint32_t IndexOf(uint32_t word, int value_bits) {
  return value_bits == 0 ? word : word & ((uint32_t{1} << (32 - value_bits)) - 1);
}
DAD_HD int CodeOf(uint32_t word, int value_bits) {
  return value_bits == 0 ? 0 : static_cast<int>(word >> (32 - value_bits));
}

}  // namespace dad::cuda
