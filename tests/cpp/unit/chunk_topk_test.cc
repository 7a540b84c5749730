// The codec of chunked top-k: what is picked, how it is rounded, and what a decoder refuses.
#include "codec/chunk_topk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "codec/chunk_pick.h"

namespace dad {
namespace {

std::vector<CpuLevel> Levels() {
  return BestCpuLevel() >= CpuLevel::kAvx2
             ? std::vector<CpuLevel>{CpuLevel::kBaseline, CpuLevel::kAvx2}
             : std::vector<CpuLevel>{CpuLevel::kBaseline};
}

// The k largest by sorting; of equal ones the first, never zeros.
template <typename T>
std::vector<uint32_t> Sorted(const std::vector<T>& values, int64_t k) {
  std::vector<uint32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::fabs(values[a]) > std::fabs(values[b]);
  });
  order.resize(std::min(order.size(), static_cast<size_t>(k)));
  std::erase_if(order, [&](uint32_t i) { return values[i] == 0; });
  std::sort(order.begin(), order.end());
  return order;
}

template <typename T>
void ExpectPicksTheLargest(const std::vector<T>& values, int64_t k) {
  for (const CpuLevel level : Levels()) {
    ChunkPicker<T> picker(level);
    std::vector<T> sum(values.size());
    std::vector<uint32_t> picked = {7};  // what was there stays
    ChunkTerms<T> terms{values.data(), T(1),       nullptr,
                        T(1),          sum.data(), static_cast<int64_t>(values.size())};
    ASSERT_TRUE(picker.Pick(terms, k, 100, picked));
    EXPECT_EQ(sum, values);
    ASSERT_EQ(picked.at(0), 7u);
    picked.erase(picked.begin());
    for (uint32_t& i : picked) i -= 100;
    EXPECT_EQ(picked, Sorted(values, k)) << values.size() << " elements, k " << k;
  }
}

template <typename T>
std::vector<T> Random(size_t count, uint32_t seed, bool heavy) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(count);
  for (T& x : values) x = static_cast<T>(heavy ? std::exp(2 * normal(random)) : normal(random));
  return values;
}

TEST(ChunkPickTest, TakesTheLargestOfAnySizeWhateverTheValues) {
  for (const size_t count : {1, 2, 63, 64, 65, 255, 256, 257, 1000, 4095, 4096}) {
    for (const int64_t k : {1, 3, 64, 100, 1000, 4096}) {
      ExpectPicksTheLargest(Random<float>(count, 1, false), k);
      ExpectPicksTheLargest(Random<float>(count, 2, true), k);
      ExpectPicksTheLargest(Random<double>(count, 3, true), k);
    }
  }
}

TEST(ChunkPickTest, OfEqualOnesTakesTheFirstAndNeverZeros) {
  ExpectPicksTheLargest(std::vector<float>(4096, -0.5f), 64);
  ExpectPicksTheLargest(std::vector<float>(4096, 0.0f), 64);
  std::vector<float> few(4096, 0.0f);
  few[17] = 1;
  few[4000] = -2;
  ExpectPicksTheLargest(few, 64);
  // Three magnitudes, many times each, and the largest close together.
  std::vector<double> steps(4096);
  for (size_t i = 0; i < steps.size(); ++i) steps[i] = static_cast<double>(i * 7919 % 3) - 1.5;
  for (const int64_t k : {1, 64, 1500, 3000}) ExpectPicksTheLargest(steps, k);
  std::vector<float> together(4096, 1e-30f);
  for (size_t i = 300; i < 500; ++i) together[i] = static_cast<float>(i);
  ExpectPicksTheLargest(together, 64);
}

TEST(ChunkPickTest, AddsWhatWaitsAndRefusesWhatIsNotFinite) {
  const std::vector<float> g = Random<float>(1000, 4, false), e = Random<float>(1000, 5, false);
  for (const CpuLevel level : Levels()) {
    ChunkPicker<float> picker(level);
    std::vector<float> sum(1000);
    std::vector<uint32_t> picked;
    ASSERT_TRUE(picker.Pick({g.data(), 0.25f, e.data(), 0.5f, sum.data(), 1000}, 10, 0, picked));
    for (size_t i = 0; i < sum.size(); ++i) EXPECT_EQ(sum[i], 0.25f * g[i] + 0.5f * e[i]);
    EXPECT_EQ(picked, Sorted(sum, 10));
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      std::vector<float> poisoned = g;
      poisoned[999] = bad;
      std::vector<uint32_t> none;
      EXPECT_FALSE(picker.Pick({poisoned.data(), 1, e.data(), 1, sum.data(), 1000}, 10, 0, none));
      EXPECT_TRUE(none.empty());
    }
  }
}

// Encodes all runs of `values`, k of each chunk; what is left takes the place of the values.
template <typename T>
std::vector<std::byte> Encode(const ChunkCode& code, std::vector<T>& values) {
  std::vector<std::byte> bytes;
  const auto count = static_cast<int64_t>(values.size());
  for (int64_t run = 0; run < count; run += code.run()) {
    std::vector<uint32_t> index;
    const int64_t end = std::min(count, run + code.run());
    for (int64_t at = run; at < end; at += code.chunk) {
      const auto from = values.begin() + at;
      const std::vector<T> chunk(from, from + std::min(code.chunk, end - at));
      for (const uint32_t i : Sorted(chunk, code.k)) {
        index.push_back(static_cast<uint32_t>(at - run) + i);
      }
    }
    std::vector<T> picked;
    for (const uint32_t i : index) picked.push_back(values[static_cast<size_t>(run) + i]);
    EncodeChunkRun<T>(code, index, picked, bytes);
    for (size_t i = 0; i < index.size(); ++i)
      values[static_cast<size_t>(run) + index[i]] = picked[i];
  }
  return bytes;
}

template <typename T>
std::vector<T> Decode(const ChunkCode& code, size_t count, const std::vector<std::byte>& bytes) {
  std::vector<T> sum(count, T(0));
  ByteReader in(bytes);
  const auto added = AddChunks<T>(code, static_cast<int64_t>(count), in, sum.data());
  EXPECT_TRUE(added.ok()) << added.status().ToString();
  EXPECT_TRUE(in.AtEnd());
  return sum;
}

TEST(ChunkTopKTest, WhatIsDecodedAndWhatIsLeftAreTheValue) {
  for (const int bits : {1, 2, 3, 4, 5, 8}) {
    const ChunkCode code{.chunk = 100, .k = 9, .bits = bits};
    for (const size_t count : {0, 1, 5, 100, 101, 1234}) {
      const std::vector<double> x = Random<double>(count, 6, true);
      std::vector<double> left = x;
      const std::vector<double> sent = Decode<double>(code, count, Encode(code, left));
      for (size_t i = 0; i < count; ++i)
        EXPECT_NEAR(sent[i] + left[i], x[i], 4e-15 * (std::fabs(x[i]) + std::fabs(sent[i])));
    }
  }
}

TEST(ChunkTopKTest, EqualMagnitudesAreSentExactly) {
  const ChunkCode code{.chunk = 64, .k = 8, .bits = 2};
  std::vector<float> x(640, 0.0f);
  for (size_t i = 0; i < x.size(); i += 9)
    x[i] = (i % 2 ? -1.0f : 1.0f) * std::ldexp(1.0f, static_cast<int>(i / 64));
  std::vector<float> left = x;
  EXPECT_EQ(Decode<float>(code, x.size(), Encode(code, left)), x);
  EXPECT_EQ(left, std::vector<float>(x.size(), 0.0f));
}

// Two magnitudes per chunk are two levels, in whatever ratio: the least error is none but that of
// rounding to bfloat16.
TEST(ChunkTopKTest, LevelsFollowTheValues) {
  const ChunkCode code{.chunk = 64, .k = 16, .bits = 2};
  std::vector<double> x(640, 0.0);
  for (size_t i = 0; i < x.size(); i += 4) x[i] = i % 16 == 0 ? -37.0 : 3.0;
  std::vector<double> left = x;
  (void)Encode(code, left);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_LE(std::fabs(left[i]), std::fabs(x[i]) * 0.01);
}

TEST(ChunkTopKTest, MoreBitsLeaveLess) {
  double before = 1e300;
  for (const int bits : {1, 2, 3, 4, 6, 8}) {
    const ChunkCode code{.chunk = 4096, .k = 64, .bits = bits};
    std::vector<float> left = Random<float>(1 << 16, 8, false);
    const std::vector<std::byte> bytes = Encode(code, left);
    double error = 0, sent = 0;
    const std::vector<float> decoded = Decode<float>(code, left.size(), bytes);
    for (size_t i = 0; i < left.size(); ++i) {
      if (decoded[i] == 0) continue;
      error += std::pow(static_cast<double>(left[i]), 2);
      sent += std::pow(static_cast<double>(decoded[i]), 2);
    }
    EXPECT_LT(error, before);
    EXPECT_LT(error, 0.02 * sent);  // a normal tail is narrow
    before = error;
    const double expected = static_cast<double>(code.ExpectedBytes(1 << 16));
    EXPECT_NEAR(static_cast<double>(bytes.size()), expected, 0.05 * expected);
  }
}

TEST(ChunkTopKTest, ValuesBeyondTheRangeOfAScaleWaitAndNothingOverflows) {
  const ChunkCode code{.chunk = 8, .k = 4, .bits = 2};
  std::vector<float> huge = {3e38f, -3e38f, 1, 0, 0, 0, 0, 0, 1e-44f, 0, 0, 0, 0, 0, 0, 0};
  std::vector<float> left = huge;
  const std::vector<float> sent = Decode<float>(code, huge.size(), Encode(code, left));
  for (size_t i = 0; i < huge.size(); ++i) {
    EXPECT_TRUE(std::isfinite(sent[i]) && std::isfinite(left[i])) << i;
    EXPECT_LE(std::fabs(left[i]), 3.1e38f);
  }
  EXPECT_EQ(left[8], huge[8]);
  std::vector<double> wide = {1e300, 0, 0, 0, 0, 0, 0, 0, 1e-300, 0, 0, 0, 0, 0, 0, 0};
  std::vector<double> rest = wide;
  (void)Decode<double>(code, wide.size(), Encode(code, rest));
  EXPECT_EQ(rest[8], wide[8]);
}

TEST(ChunkTopKTest, CountsWhatCameOfEachChunk) {
  const ChunkCode code{.chunk = 10, .k = 3, .bits = 2};
  std::vector<float> x(35, 0.0f);
  x[0] = x[1] = x[2] = x[3] = 1;
  x[34] = -1;
  const std::vector<std::byte> bytes = Encode(code, x);
  std::vector<uint32_t> most = {1, 2, 0, 0};
  std::vector<float> sum(35, 0.0f);
  ByteReader in(bytes);
  EXPECT_EQ(AddChunks<float>(code, 35, in, sum.data(), &most).value(), 4);
  EXPECT_EQ(most, (std::vector<uint32_t>{3, 2, 0, 1}));
}

TEST(ChunkTopKTest, MalformedInputIsRefused) {
  const ChunkCode code{.chunk = 16, .k = 4, .bits = 2};
  std::vector<float> x = Random<float>(100, 9, false);
  const std::vector<std::byte> good = Encode(code, x);
  const auto refused = [&](const std::vector<std::byte>& bytes) {
    std::vector<float> sum(100, 0.0f);
    ByteReader in(bytes);
    return !AddChunks<float>(code, 100, in, sum.data()).ok();
  };
  ASSERT_FALSE(refused(good));
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_TRUE(refused({good.begin(), good.begin() + static_cast<int64_t>(size)})) << size;
  }
  // The last 7 numbers are the scales of the chunks, two before them the levels.
  const auto with = [&](size_t from_end, uint16_t number) {
    std::vector<std::byte> bytes = good;
    std::memcpy(bytes.data() + bytes.size() - 2 * from_end, &number, 2);
    return bytes;
  };
  for (const uint16_t scale : {0x0000, 0x8000, 0x7f80, 0x7fc0, 0x7f00, 0xbf80}) {
    EXPECT_TRUE(refused(with(1, scale))) << scale;
    EXPECT_TRUE(refused(with(7, scale))) << scale;
  }
  for (const uint16_t level : {0x0000, 0x7f80, 0xbf80, 0x4f00}) {
    EXPECT_TRUE(refused(with(8, level))) << level;
  }
  EXPECT_TRUE(refused(with(8, 0x3a80)));  // below the level before it
}

}  // namespace
}  // namespace dad
