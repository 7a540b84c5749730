// Kernels that methods on a device need beside the codecs: the threshold, conversions, residuals.
// Emulated on the host, against the CPU's code bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "codec/cuda/feedback_kernels.h"
#include "codec/cuda/qsgd_kernels.h"
#include "codec/cuda/result_kernels.h"
#include "codec/cuda/tau_kernels.h"
#include "codec/qsgd.h"
#include "codec/strom.h"
#include "emulate.h"
#include "util/half.h"

namespace dad::cuda {
namespace {

template <typename T>
std::vector<T> Numbers(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& x : values) x = static_cast<T>(normal(random));
  return values;
}

template <typename T>
struct Tau {
  double mean = 0;
  Threshold<T> threshold = {};
  int not_finite = 0;
};
template <typename T>
Tau<T> FindTau(const std::vector<T>& x, T scale, double tau, double mean) {
  const auto count = static_cast<int64_t>(x.size());
  std::vector<double> sums(static_cast<size_t>(DivideUp(count, kSumOver)), -1);
  Emulate<SumSquaresKernel<T>>({x.data(), count, scale, sums.data()});
  Tau<T> found;
  typename TauKernel<T>::Args args{};
  args.sums = sums.data();
  args.num_sums = static_cast<int64_t>(sums.size());
  args.count = count;
  args.tau = tau;
  args.mean = &mean;
  args.new_mean = &found.mean;
  args.threshold = &found.threshold;
  args.not_finite = &found.not_finite;
  Emulate<TauKernel<T>>(args);
  return found;
}

template <typename T>
void CheckTau() {
  for (const int64_t count : {0, 1, 7, 8, 9, 4095, 4097, 65535, 65536, 65541, 140'003}) {
    const std::vector<T> x = Numbers<T>(count, 3);
    const double rms = RootMeanSquare(x.data(), count, T(0.3));
    const Tau<T> first = FindTau(x, T(0.3), 4, 0);
    EXPECT_EQ(first.mean, rms) << count;
    EXPECT_EQ(first.threshold.tau, static_cast<float>(4 * rms));
    EXPECT_EQ(first.threshold.least, count == 0 ? std::numeric_limits<T>::infinity()
                                                : static_cast<T>(static_cast<float>(4 * rms)));
    EXPECT_EQ(FindTau(x, T(0.3), 4, 0.7).mean, 0.9 * 0.7 + 0.1 * rms);
    EXPECT_EQ(first.not_finite, 0);
  }
}
TEST(MethodKernelsTest, TheThresholdIsThatOfTheCpu) {
  CheckTau<float>();
  CheckTau<double>();
}

TEST(MethodKernelsTest, AGradientThatIsNotFiniteHasNoThreshold) {
  std::vector<float> x = Numbers<float>(70'000, 3);
  x[69'999] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(FindTau(x, 1.0f, 4, 1).not_finite, 1);
  x[69'999] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(FindTau(x, 1.0f, 4, 1).not_finite, 1);
}

TEST(MethodKernelsTest, SixteenBitsBecomeFloatsAndFloatsSixteenBits) {
  constexpr int64_t kCount = 1 << 16;
  std::vector<Half> halves(kCount);
  std::vector<BFloat16> wide(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    halves[i].bits = static_cast<uint16_t>(i);
    wide[i].bits = static_cast<uint16_t>(i);
  }
  std::vector<float> x(kCount), y(kCount);
  Emulate<WidenKernel<Half>>({halves.data(), kCount, x.data()});
  Emulate<WidenKernel<BFloat16>>({wide.data(), kCount, y.data()});
  for (size_t i = 0; i < kCount; ++i) {
    if (!std::isnan(x[i])) ASSERT_EQ(x[i], HalfToFloat(static_cast<uint16_t>(i)));
    if (!std::isnan(y[i])) ASSERT_EQ(y[i], BFloat16ToFloat(static_cast<uint16_t>(i)));
  }
  const std::vector<float> sum = Numbers<float>(3000, 5);
  Emulate<ResultKernel<float, Half>>({sum.data(), 3000, 3, 0.7f, false, halves.data()});
  Emulate<ResultKernel<float, BFloat16>>({sum.data(), 3000, 3, 0.7f, false, wide.data()});
  for (size_t i = 0; i < sum.size(); ++i) {
    ASSERT_EQ(halves[i].bits, FloatToHalf(sum[i] / 3 * 0.7f));
    ASSERT_EQ(wide[i].bits, FloatToBFloat16(sum[i] / 3 * 0.7f));
  }
}

TEST(MethodKernelsTest, NothingIsTheNaNOfTheHost) {
  std::vector<double> sum(2000, 1.0);
  Emulate<ResultKernel<double, double>>({sum.data(), 2000, 2, 1, true, sum.data()});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(std::memcmp(&sum[1999], &nan, sizeof nan), 0);
}

TEST(MethodKernelsTest, WhatWasKeptIsAddedAndWhatWasSentIsTakenOff) {
  for (const int64_t count : {0, 1, 1023, 1024, 1025, 5000}) {
    const std::vector<float> x = Numbers<float>(count, 1), kept = Numbers<float>(count, 2);
    std::vector<float> all(x.size()), left(x.size());
    int not_finite = 0;
    Emulate<AddKeptKernel<float>>({x.data(), count, 0.3f, kept.data(), all.data(), &not_finite});
    Emulate<LeftKernel<float>>({all.data(), kept.data(), count, left.data()});
    EXPECT_EQ(not_finite, 0);
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(all[i], x[i] * 0.3f + kept[i]);
      ASSERT_EQ(left[i], all[i] - kept[i]);
    }
  }
}

template <typename T>
void CheckQsgdKernels() {
  for (const int bits : {1, 2, 3, 4, 5, 7, 8}) {
    for (const int64_t count : {1, 7, 8, 9, 511, 512, 513, 1030, 5000}) {
      std::vector<T> x = Numbers<T>(count, static_cast<uint32_t>(count));
      for (int64_t i = 0; i < count && count > 600; ++i) {
        if (i / kQsgdBucket == 1) x[static_cast<size_t>(i)] = 0;  // a scale of 0
        if (i / kQsgdBucket == 2) x[static_cast<size_t>(i)] *= T(1e-43);
      }
      std::vector<std::byte> wanted(QsgdBytes(count, bits));
      ASSERT_TRUE(EncodeQsgd<T>(x.data(), count, T(0.7), bits, 99, wanted));
      std::vector<std::byte> bytes(wanted.size(), std::byte{0xa5});
      int not_finite = 0;
      auto* raw = reinterpret_cast<uint8_t*>(bytes.data());
      Emulate<EncodeQsgdKernel<T>>({x.data(), count, T(0.7), bits, 99, raw, &not_finite});
      EXPECT_EQ(not_finite, 0);
      ASSERT_TRUE(bytes == wanted) << bits << " bits, " << count;
      std::vector<T> sum = Numbers<T>(count, 5), wanted_sum = sum;
      ASSERT_TRUE(CheckQsgd(wanted, count, bits).ok());
      ASSERT_TRUE(AddQsgd<T>(wanted, count, bits, wanted_sum.data()).ok());
      Emulate<AddQsgdKernel<T>>({raw, count, bits, sum.data()});
      ASSERT_EQ(std::memcmp(sum.data(), wanted_sum.data(), sum.size() * sizeof(T)), 0);
      for (const T bad :
           {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity()}) {
        x[static_cast<size_t>(count / 2)] = bad;
        not_finite = 0;
        Emulate<EncodeQsgdKernel<T>>({x.data(), count, T(0.7), bits, 99, raw, &not_finite});
        EXPECT_EQ(not_finite, 1);
      }
    }
  }
}
TEST(MethodKernelsTest, QsgdIsThatOfTheHost) {
  CheckQsgdKernels<float>();
  CheckQsgdKernels<double>();
}

}  // namespace
}  // namespace dad::cuda
