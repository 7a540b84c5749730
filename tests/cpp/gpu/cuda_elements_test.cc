// The element functions of the device code against the CPU's, bit for bit.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "codec/cuda/elements.h"
#include "codec/int_run.h"
#include "codec/strom.h"
#include "codec/vgc.h"
#include "util/half.h"

namespace dad::cuda {
namespace {

template <typename T>
std::vector<T> SpecialValues() {
  using Limits = std::numeric_limits<T>;
  std::vector<T> values;
  for (const T x :
       {Limits::denorm_min(), Limits::min(), Limits::epsilon(), T(1), T(1.5), T(1.75), T(65504),
        T(65520), T(65536), Limits::max(), T(0x1p-14), T(0x1p-24), T(0x1p-25)}) {
    for (const T y : {x, std::nextafter(x, T(0)), std::nextafter(x, Limits::infinity())}) {
      values.push_back(y);
      values.push_back(-y);
    }
  }
  return values;
}

TEST(CudaElementsTest, HalvesAreThoseOfTheCpu) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    ASSERT_EQ(std::bit_cast<uint32_t>(ToFloat(Half{half})),
              std::bit_cast<uint32_t>(HalfToFloat(half)));
    ASSERT_EQ(std::bit_cast<uint32_t>(ToFloat(BFloat16{half})),
              std::bit_cast<uint32_t>(BFloat16ToFloat(half)));
  }
  // Every exponent and sign, with mantissas around the places where rounding changes.
  for (uint32_t top = 0; top < 0x200; ++top) {
    for (uint32_t middle = 0; middle < 0x400; ++middle) {
      for (const uint32_t low : {0x0u, 0x1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu}) {
        const auto x = std::bit_cast<float>(top << 23 | middle << 13 | low);
        ASSERT_EQ(ToHalf(x).bits, FloatToHalf(x)) << x;
        ASSERT_EQ(ToBFloat16(x).bits, FloatToBFloat16(x)) << x;
      }
    }
  }
}

template <typename T>
void CheckExponents() {
  for (int e = -1200; e <= 1200; ++e) {
    ASSERT_EQ(PowerOfTwo<T>(e), std::ldexp(T(1), e)) << e;
  }
  for (const T x : SpecialValues<T>()) {
    if (x == 0 || std::isinf(x)) continue;
    const Exponent e = ExponentOf(x);
    ASSERT_EQ(e.floor, std::ilogb(x)) << x;
    ASSERT_EQ(e.upper_half, std::fabs(std::scalbn(x, -std::ilogb(x))) >= T(1.5)) << x;
  }
}
TEST(CudaElementsTest, ExponentsAndPowersAreThoseOfTheLibrary) {
  CheckExponents<float>();
  CheckExponents<double>();
}

template <typename T>
void CheckInts(int limit) {
  std::vector<T> values = SpecialValues<T>();
  values.insert(values.end(),
                {T(0), std::numeric_limits<T>::infinity(), std::numeric_limits<T>::quiet_NaN()});
  for (const T x : values) {
    const float wanted = ScaleOfRun(&x, 1, limit);
    const float scale = ScaleOf<T>(MagnitudeBits(x), limit);
    ASSERT_EQ(std::bit_cast<uint32_t>(scale), std::bit_cast<uint32_t>(wanted)) << x;
    ASSERT_TRUE(dad::IsScale(scale)) << x;
    if (!(scale > 0)) continue;
    for (int k = -4 * limit; k <= 4 * limit; ++k) {
      const T y = x * (static_cast<T>(k) / static_cast<T>(4 * limit));
      int8_t q = 0;
      RunToInts(&y, 1, scale, limit, &q);
      ASSERT_EQ(ToInt(y, T(1) / static_cast<T>(scale), limit), q) << x << " " << k;
    }
  }
}
TEST(CudaElementsTest, ScalesAndIntegersAreThoseOfTheCpu) {
  for (const int limit : {7, 127}) {
    CheckInts<float>(limit);
    CheckInts<double>(limit);
  }
}

template <typename T>
void CheckVgcCodes() {
  for (const T x : SpecialValues<T>()) {
    if (x == 0 || std::isinf(x)) continue;
    for (const int above : {0, 1, 6, 7, 8, 9}) {
      const int e_max = std::ilogb(x) + above;
      T values[16];
      VgcValues(e_max, values);
      for (int code = 0; code < 16; ++code) ASSERT_EQ(VgcValue<T>(e_max, code), values[code]);
      Selected<T> selected;
      selected.index = {0};
      selected.r = {x};
      selected.v = {T(1)};
      T r = 0;
      T v = 0;
      const Coded coded = EncodeVgc(e_max, T(0.5), false, selected, &r, &v);
      ASSERT_EQ(VgcCode(e_max, x), coded.code.empty() ? -1 : coded.code[0]) << x << " " << e_max;
    }
  }
}
TEST(CudaElementsTest, CodesOfVgcAreThoseOfTheCpu) {
  CheckVgcCodes<float>();
  CheckVgcCodes<double>();
}

template <typename T>
void CheckStrom() {
  std::mt19937 random(7);
  std::uniform_real_distribution<T> uniform(T(-3), T(3));
  constexpr float kTau = 0.3f;
  for (int k = 0; k < 5000; ++k) {
    const T r0 = k < 40 ? static_cast<T>(kTau) * static_cast<T>(k - 20) : uniform(random);
    if (std::fabs(r0) < kTau) continue;
    const T v0 = std::fabs(uniform(random));
    for (const bool multiples : {false, true}) {
      for (const bool variance : {false, true}) {
        Selected<T> selected;
        selected.index = {0};
        selected.r = {r0};
        if (variance) selected.v = {v0};
        T r = 0;
        T v = 0;
        const Coded coded = EncodeStrom(kTau, multiples, selected, &r, variance ? &v : nullptr);
        const StromSent<T> sent = StromElement(kTau, multiples, r0, variance ? &v0 : nullptr);
        ASSERT_EQ(sent.code, coded.code[0]) << r0;
        ASSERT_EQ(sent.r, r);
        ASSERT_EQ(sent.v, v);
      }
    }
  }
}
TEST(CudaElementsTest, MultiplesOfStromAreThoseOfTheCpu) {
  CheckStrom<float>();
  CheckStrom<double>();
}

}  // namespace
}  // namespace dad::cuda
