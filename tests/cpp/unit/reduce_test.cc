#include "linalg/reduce.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "exchange_harness.h"
#include "util/half.h"

namespace dad {
namespace {

using exchange_test::AllDTypes;
using exchange_test::IsUnsigned;
using exchange_test::Tensor;

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

std::vector<const void*> Pointers(std::vector<Tensor>& tensors) {
  std::vector<const void*> pointers;
  for (Tensor& t : tensors) pointers.push_back(t.View().data);
  return pointers;
}

std::vector<Tensor> RandomInputs(int num, DType dtype, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Tensor> inputs;
  for (int r = 0; r < num; ++r) {
    inputs.emplace_back(dtype, Shape{count});
    const bool is_unsigned = IsUnsigned(dtype);
    inputs.back().FillRandom(random, is_unsigned ? 0 : -5, 6);
  }
  return inputs;
}

double Reference(ReduceOp op, const std::vector<Tensor>& inputs, int64_t i, DType dtype) {
  double acc = inputs[0].At(i);
  for (size_t r = 1; r < inputs.size(); ++r) {
    const double x = inputs[r].At(i);
    switch (op) {
      case ReduceOp::kMin: acc = std::min(acc, x); break;
      case ReduceOp::kMax: acc = std::max(acc, x); break;
      case ReduceOp::kProduct: acc *= x; break;
      default: acc += x;
    }
  }
  if (op == ReduceOp::kAverage) {
    acc /= static_cast<double>(inputs.size());
    if (!IsFloating(dtype)) acc = std::trunc(acc);
  }
  return acc;
}

double Tolerance(DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat16: return std::abs(value) * 0x1p-11 + 0x1p-18;
    case DType::kBFloat16: return std::abs(value) * 0x1p-8 + 0x1p-18;
    case DType::kFloat32: return std::abs(value) * 0x1p-21 + 0x1p-18;
    case DType::kFloat64: return std::abs(value) * 0x1p-50 + 0x1p-45;
    default: return 0;
  }
}

TEST(ReduceTest, EveryTypeAndOpAgreesWithDouble) {
  for (DType dtype : AllDTypes()) {
    for (ReduceOp op : kOps) {
      for (int num : {1, 2, 3, 4, 7, 8, 11}) {
        if (op == ReduceOp::kProduct && num > 3) continue;  // leaves the small types' range
        for (int64_t count : {0, 1, 5, 31, 1500}) {
          std::vector<Tensor> inputs = RandomInputs(num, dtype, count, 7);
          Tensor out(dtype, {count});
          ReduceInRankOrder(Pointers(inputs), out.View().data, count, dtype, op, 1, 1, num);
          for (int64_t i = 0; i < count; ++i) {
            double expected = Reference(op, inputs, i, dtype);
            if (dtype == DType::kBool) expected = expected != 0;
            if (dtype == DType::kUint8) expected = static_cast<uint8_t>(expected);
            if (dtype == DType::kUint16) {
              expected = static_cast<uint16_t>(static_cast<int64_t>(expected));
            }
            if (dtype == DType::kInt8) {
              expected = static_cast<int8_t>(static_cast<int64_t>(expected));
            }
            ASSERT_NEAR(out.At(i), expected, Tolerance(dtype, expected))
                << Name(dtype) << " " << Name(op) << " of " << num << " at " << i;
          }
        }
      }
    }
  }
}

TEST(ReduceTest, AllCpuLevelsGiveTheSameBits) {
  if (BestCpuLevel() == CpuLevel::kBaseline) GTEST_SKIP() << "this machine has one level";
  for (DType dtype : AllDTypes()) {
    for (ReduceOp op : kOps) {
      for (int num : {1, 3, 4, 9}) {
        for (double scale : {1.0, 0.3}) {
          const int64_t count = 1037;
          std::vector<Tensor> inputs = RandomInputs(num, dtype, count, 11);
          Tensor a(dtype, {count}), b(dtype, {count});
          ReduceInRankOrderAt(CpuLevel::kBaseline, Pointers(inputs), a.View().data, count, dtype,
                              op, scale, scale, num);
          ReduceInRankOrderAt(CpuLevel::kAvx2, Pointers(inputs), b.View().data, count, dtype, op,
                              scale, scale, num);
          EXPECT_EQ(a.bytes(), b.bytes()) << Name(dtype) << " " << Name(op) << " of " << num;
        }
      }
    }
  }
}

TEST(ReduceTest, OutputMayBeAnyOfTheInputs) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kInt16}) {
    for (int alias = 0; alias < 3; ++alias) {
      std::vector<Tensor> inputs = RandomInputs(3, dtype, 2500, 13);
      Tensor expected(dtype, {2500});
      const auto pointers = Pointers(inputs);
      ReduceInRankOrder(pointers, expected.View().data, 2500, dtype, ReduceOp::kSum, 1, 1, 3);
      Tensor& out = inputs[static_cast<size_t>(alias)];
      ReduceInRankOrder(pointers, out.View().data, 2500, dtype, ReduceOp::kSum, 1, 1, 3);
      EXPECT_EQ(out.bytes(), expected.bytes()) << Name(dtype) << " in place of " << alias;
    }
  }
}

TEST(ReduceTest, ElementsMayLieAtAnyAddress) {
  const float values[] = {1.5f, -2.25f, 1e10f};
  std::vector<std::byte> odd(1 + sizeof values);
  std::memcpy(odd.data() + 1, values, sizeof values);
  const void* inputs[] = {odd.data() + 1, values};
  std::vector<std::byte> out(1 + sizeof values);
  ReduceInRankOrder(inputs, out.data() + 1, 3, DType::kFloat32, ReduceOp::kSum, 1, 1, 2);
  float sums[3];
  std::memcpy(sums, out.data() + 1, sizeof sums);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(sums[i], 2 * values[i]);
}

TEST(ReduceTest, AverageOfEqualValuesComesBack) {
  for (DType dtype : AllDTypes()) {
    for (int num : {2, 3, 5, 7, 13}) {
      std::vector<Tensor> inputs;
      for (int r = 0; r < num; ++r) {
        inputs.emplace_back(dtype, Shape{2});
        inputs.back().Set(0, dtype == DType::kBool ? 1 : 117);
        inputs.back().Set(1, IsUnsigned(dtype) ? 0 : -101);
      }
      Tensor out(dtype, {2});
      ReduceInRankOrder(Pointers(inputs), out.View().data, 2, dtype, ReduceOp::kAverage, 1, 1, num);
      EXPECT_EQ(out.bytes(), inputs[0].bytes()) << Name(dtype) << " of " << num;
    }
  }
}

TEST(ReduceTest, AverageOfEqualFloatsIsWithinOneUlp) {
  const float x = 0.1f;
  const void* inputs[] = {&x, &x, &x};
  float out = 0;
  ReduceInRankOrder(inputs, &out, 1, DType::kFloat32, ReduceOp::kAverage, 1, 1, 3);
  EXPECT_LE(std::abs(out - x), std::nextafter(x, 1.0f) - x);
}

TEST(ReduceTest, AbsentRanksCountInTheDivisorOnly) {
  const float x = 6, y = 3;
  const void* inputs[] = {&x, nullptr, &y};
  float out = 0;
  ReduceInRankOrder(inputs, &out, 1, DType::kFloat32, ReduceOp::kAverage, 1, 1, 3);
  EXPECT_EQ(out, 3);
  ReduceInRankOrder(inputs, &out, 1, DType::kFloat32, ReduceOp::kMin, 1, 1, 3);
  EXPECT_EQ(out, 3);
  const void* nobody[] = {nullptr, nullptr};
  ReduceInRankOrder(nobody, &out, 1, DType::kFloat32, ReduceOp::kSum, 1, 1, 2);
  EXPECT_EQ(out, 0);
}

TEST(ReduceTest, ScalesApplyBeforeAndAfter) {
  const float x = 1, y = 2;
  const void* floats[] = {&x, &y};
  float out = 0;
  ReduceInRankOrder(floats, &out, 1, DType::kFloat32, ReduceOp::kProduct, 3, 0.5, 2);
  EXPECT_EQ(out, 9);  // 0.5 * (3 * 1) * (3 * 2)
  const int32_t i = 5, j = -5;
  const void* ints[] = {&i, &j};
  int32_t int_out = 0;
  ReduceInRankOrder(ints, &int_out, 1, DType::kInt32, ReduceOp::kMin, 0.5, 2, 2);
  EXPECT_EQ(int_out, -4);  // truncated to -2, then doubled
  const int64_t big = std::numeric_limits<int64_t>::max();
  const void* bigs[] = {&big};
  int64_t big_out = 0;
  ReduceInRankOrder(bigs, &big_out, 1, DType::kInt64, ReduceOp::kSum, 4, 1, 1);
  EXPECT_EQ(big_out, big);  // stays at the end of the range
}

TEST(ReduceTest, MinAndMaxGiveNanIfAnyIsNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int where = 0; where < 3; ++where) {
    float values[3] = {1, 2, 3};
    values[where] = nan;
    const void* inputs[] = {&values[0], &values[1], &values[2]};
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      float out = 0;
      ReduceInRankOrder(inputs, &out, 1, DType::kFloat32, op, 1, 1, 3);
      EXPECT_TRUE(std::isnan(out));
    }
  }
}

TEST(ReduceTest, SaysWhetherASumIsFiniteAndWhoseFaultItIs) {
  constexpr int64_t kCount = 3001;  // several blocks, and a rest
  for (const CpuLevel level : {CpuLevel::kBaseline, BestCpuLevel()}) {
    for (const int num_ranks : {1, 3, 9}) {  // the last goes block by block
      for (const double bad : {std::nan(""), double{INFINITY}, -double{INFINITY}}) {
        for (const int64_t at : {int64_t{-1}, int64_t{0}, int64_t{1500}, kCount - 1}) {
          std::vector<std::vector<float>> ranks(static_cast<size_t>(num_ranks));
          std::vector<const void*> inputs;
          for (auto& values : ranks)
            inputs.push_back((values.assign(kCount, 0x1p120f), values.data()));
          const int culprit = num_ranks - 1;
          if (at >= 0) ranks.back()[static_cast<size_t>(at)] = static_cast<float>(bad);
          std::vector<float> out(kCount);
          const auto reduce = [&](void* to, ReduceOp op) {
            return ReduceInRankOrderAt(level, inputs, to, kCount, DType::kFloat32, op, 1, 1,
                                       num_ranks);
          };
          EXPECT_EQ(reduce(out.data(), ReduceOp::kAverage), at < 0);
          EXPECT_TRUE(reduce(out.data(), ReduceOp::kMax)) << "only sums are watched";
          EXPECT_EQ(FirstNotFinite(inputs, out.data(), kCount, DType::kFloat32),
                    at < 0 ? -1 : culprit);
          // In place on the first, which is blamed only if no other is found.
          EXPECT_EQ(reduce(ranks[0].data(), ReduceOp::kSum), at < 0);
          if (at >= 0) {
            EXPECT_EQ(FirstNotFinite(inputs, ranks[0].data(), kCount, DType::kFloat32), culprit);
          }
        }
      }
    }
  }
}

TEST(ReduceTest, HalvesAreWatchedBeforeTheyAreRounded) {
  std::vector<uint16_t> large(100, FloatToHalf(60000)), out(100);
  const void* inputs[] = {large.data(), large.data()};
  const auto sum = [&] {
    return ReduceInRankOrder(inputs, out.data(), 100, DType::kFloat16, ReduceOp::kSum, 1, 1, 2);
  };
  EXPECT_TRUE(sum()) << "an overflow of finite values";
  EXPECT_EQ(out[0], 0x7c00);
  large[99] = 0x7c00;
  EXPECT_FALSE(sum());
}

TEST(ReduceTest, HalfSumsAreRoundedOnce) {
  // In half 2048 + 1 rounds back to 2048; in float the ones add up first.
  std::vector<Tensor> inputs;
  for (double x : {2048.0, 1.0, 1.0, 1.0, 1.0}) {
    inputs.emplace_back(DType::kFloat16, Shape{1});
    inputs.back().Set(0, x);
  }
  Tensor out(DType::kFloat16, {1});
  ReduceInRankOrder(Pointers(inputs), out.View().data, 1, DType::kFloat16, ReduceOp::kSum, 1, 1, 5);
  EXPECT_EQ(out.At(0), 2052);
}

TEST(HalfTest, EveryHalfSurvivesTheRoadThroughFloat) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float value = HalfToFloat(half);
    if (std::isnan(value)) {
      EXPECT_EQ(FloatToHalf(value), half | 0x200);
    } else {
      EXPECT_EQ(FloatToHalf(value), half);
    }
  }
}

TEST(HalfTest, RoundsToNearestEven) {
  EXPECT_EQ(FloatToHalf(2049.0f), FloatToHalf(2048.0f));
  EXPECT_EQ(FloatToHalf(2051.0f), FloatToHalf(2052.0f));
  EXPECT_EQ(FloatToHalf(65519.0f), 0x7bff);
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToHalf(-1e30f), 0xfc00);
  EXPECT_EQ(FloatToHalf(0x1p-24f), 0x0001);
  EXPECT_EQ(FloatToHalf(0x1p-25f), 0x0000);
  EXPECT_EQ(FloatToHalf(0x1.8p-25f), 0x0001);
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x3f808000u)), 0x3f80);
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x3f818000u)), 0x3f82);
  EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(HalfTest, ScalarConversionEqualsTheMachines) {
  if (BestCpuLevel() == CpuLevel::kBaseline) GTEST_SKIP() << "this machine has one level";
  // A sum of one passes each value to float and back, at 8 values per instruction; halves
  // scaled by odd factors reach every kind of rounding.
  std::vector<uint16_t> all(0x10000), a(all.size()), b(all.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const void* inputs[] = {all.data()};
  for (double scale : {1.0, 0.37, 1.7, 1e-5, 0.0625}) {
    const int64_t count = static_cast<int64_t>(all.size());
    ReduceInRankOrderAt(CpuLevel::kBaseline, inputs, a.data(), count, DType::kFloat16,
                        ReduceOp::kSum, scale, 1, 1);
    ReduceInRankOrderAt(CpuLevel::kAvx2, inputs, b.data(), count, DType::kFloat16, ReduceOp::kSum,
                        scale, 1, 1);
    EXPECT_EQ(a, b) << "scale " << scale;
  }
}

}  // namespace
}  // namespace dad
