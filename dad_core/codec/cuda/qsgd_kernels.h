// QSGD (codec/qsgd.h): values rounded at random to few levels, in buckets with a scale each.
#pragma once

#include <cmath>
#include <cstdint>

#include "codec/cuda/kernel.h"

namespace dad::cuda {

constexpr int64_t kQsgdBucket = 512;
constexpr int64_t kQsgdGroup = 8;  // elements that fill bytes whatever `bits` is

// In [0, 1): by the finaliser of SplitMix64.
DAD_HD double QsgdUniform(uint64_t key, int64_t element) {
  uint64_t x = key + static_cast<uint64_t>(element) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  x = x ^ (x >> 31);
  return static_cast<double>(x >> 11) * (1.0 / (uint64_t{1} << 53));
}

// The least float that is not below x >= 0; NaN if there is none or x is NaN.
DAD_HD float QsgdScale(double x) {
  if (!(x <= static_cast<double>(Limits<float>::kLargest))) return NotANumber<float>();
  const auto rounded = static_cast<float>(x);
  if (!(static_cast<double>(rounded) < x)) return rounded;
  return BitsAs<float>(BitsAs<uint32_t>(rounded) + 1);
}

DAD_HD int QsgdLevels(int bits) { return (1 << (bits - 1)) - 1; }

DAD_HD int QsgdCode(double x, double scale, int bits, double u) {
  const int levels = QsgdLevels(bits);
  if (scale == 0) return levels;
  const int least = bits == 1 ? 0 : -levels;
  const int most = bits == 1 ? 1 : levels;
  const double place = bits == 1 ? (x / scale + 1) / 2 + u : levels * x / scale + u;
  const auto q = static_cast<int>(floor(place));
  return (q < least ? least : q > most ? most : q) - least;
}

template <typename T>
DAD_HD T QsgdValue(int code, float scale, int bits) {
  const auto wide = static_cast<double>(scale);
  if (scale == 0) return T(0);
  if (bits == 1) return static_cast<T>(code == 0 ? -wide : wide);
  const int levels = QsgdLevels(bits);
  return static_cast<T>(wide * (code - levels) / levels);
}

// A block per bucket.
template <typename T>
struct EncodeQsgdKernel : ScaledKernel<EncodeQsgdKernel<T>, T> {
  struct Args {
    const T* x;
    int64_t count;
    T factor;
    int bits;
    uint64_t key;
    uint8_t* out;     // scales, then codes; aligned for a float
    int* not_finite;  // set if a value is not, or is beyond the range of a float
  };
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kQsgdBucket); }
  static DAD_HD int64_t Size(int64_t block, const Args& a) {
    const int64_t left = a.count - block * kQsgdBucket;
    return left < kQsgdBucket ? left : kQsgdBucket;
  }
  static DAD_HD T Value(int64_t block, int64_t i, const Args& a) {
    return a.x[block * kQsgdBucket + i] * a.factor;
  }

  static DAD_HD void Write(Where at, Word<T> largest, const Args& a) {
    const int64_t begin = at.block * kQsgdBucket;
    const int64_t size = Size(at.block, a);
    const float scale = QsgdScale(static_cast<double>(BitsAs<T>(largest)));
    if (at.thread == 0) {
      reinterpret_cast<float*>(a.out)[at.block] = scale;
      if (!(scale - scale == 0)) *a.not_finite = 1;
    }
    const int64_t scales = 4 * DivideUp(a.count, kQsgdBucket);
    uint8_t* codes = a.out + scales + begin / kQsgdGroup * a.bits;
    const int64_t first = at.thread * kQsgdGroup;
    if (first >= size || !(scale - scale == 0)) return;
    const int64_t group = size - first < kQsgdGroup ? size - first : kQsgdGroup;
    uint64_t packed = 0;
    for (int64_t k = 0; k < group; ++k) {
      const auto value = static_cast<double>(Value(at.block, first + k, a));
      const int code = QsgdCode(value, static_cast<double>(scale), a.bits,
                                QsgdUniform(a.key, begin + first + k));
      packed |= static_cast<uint64_t>(code) << (k * a.bits);
    }
    codes += first / kQsgdGroup * a.bits;
    for (int64_t byte = 0; byte < DivideUp(group * a.bits, 8); ++byte) {
      codes[byte] = static_cast<uint8_t>(packed >> (8 * byte));
    }
  }
};

// sum += values, of a share that has been checked.
template <typename T>
struct AddQsgdKernel : ElementwiseKernel<AddQsgdKernel<T>> {
  struct Args {
    const uint8_t* in;
    int64_t count;
    int bits;
    T* sum;
  };

  static DAD_HD void Element(int64_t i, const Args& a) {
    const auto* scales = reinterpret_cast<const float*>(a.in);
    const uint8_t* codes = a.in + 4 * DivideUp(a.count, kQsgdBucket);
    const int64_t from = i * a.bits;
    const int shift = static_cast<int>(from % 8);
    unsigned both = codes[from / 8];
    if (shift + a.bits > 8) both |= static_cast<unsigned>(codes[from / 8 + 1]) << 8;
    const auto code = static_cast<int>(both >> shift & ((1u << a.bits) - 1));
    a.sum[i] += QsgdValue<T>(code, scales[i / kQsgdBucket], a.bits);
  }
};

}  // namespace dad::cuda
