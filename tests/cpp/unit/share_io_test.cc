// Blocks of factors: the same bits whatever way they travel, and refused when they are none.
#include "exchange/share/share_io.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "codec/zero_mask.h"
#include "util/half.h"

namespace dad {
namespace {

using Bytes = std::vector<std::byte>;

// Values as a gradient has them; `zeros` of them are zero.
Bytes Gradient(DType dtype, int64_t count, double zeros, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1e-3f);
  std::bernoulli_distribution is_zero(zeros);
  Bytes bytes(static_cast<size_t>(count) * SizeOf(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const float value = is_zero(random) ? 0 : normal(random);
    std::byte* to = bytes.data() + static_cast<size_t>(i) * SizeOf(dtype);
    if (dtype == DType::kFloat64) {
      const double wide = value;
      std::memcpy(to, &wide, sizeof wide);
    } else if (dtype == DType::kFloat32) {
      std::memcpy(to, &value, sizeof value);
    } else {
      const uint16_t half = dtype == DType::kFloat16 ? FloatToHalf(value) : FloatToBFloat16(value);
      std::memcpy(to, &half, sizeof half);
    }
  }
  return bytes;
}

Bytes Written(DType dtype, Bytes& values, bool pack) {
  TensorView view{.dtype = dtype, .shape = {static_cast<int64_t>(values.size() / SizeOf(dtype))}};
  view.data = values.data();
  ShareWriter writer(pack);
  writer.Block(view);
  GatherBuffer gathered;
  writer.AppendTo(gathered);
  EXPECT_EQ(writer.size(), gathered.size());
  Bytes share;
  for (const ByteSpan piece : gathered.Pieces()) {
    share.insert(share.end(), piece.begin(), piece.end());
  }
  return share;
}

// What a rank that computes in T makes of it; none if it is refused.
template <typename T>
std::vector<T> Decoded(ByteSpan share, int64_t count) {
  ByteReader in(share);
  const BlockView block = ReadBlock(in, count);
  std::vector<T> values(static_cast<size_t>(count));
  if (!in.AtEnd() || !DecodeBlock(block, count, values.data()).ok()) return {};
  return values;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

struct Case {
  DType dtype;
  double zeros;
  double at_most;  // of the bytes that they take with only the zeros left out
};

class PackedBlockTest : public ::testing::TestWithParam<Case> {};

TEST_P(PackedBlockTest, HasTheSameBitsAndIsNeverLarger) {
  const Case& c = GetParam();
  for (const int64_t count : {0, 1, 255, 256, 257, 5000}) {
    Bytes values = Gradient(c.dtype, count, c.zeros, 3);
    const Bytes plain = Written(c.dtype, values, false);
    const Bytes packed = Written(c.dtype, values, true);
    EXPECT_LE(packed.size(), plain.size()) << count;
    if (count == 5000) {
      EXPECT_LE(static_cast<double>(packed.size()), c.at_most * static_cast<double>(plain.size()));
    }
    EXPECT_TRUE(SameBits(Decoded<float>(packed, count), Decoded<float>(plain, count))) << count;
    EXPECT_TRUE(SameBits(Decoded<double>(packed, count), Decoded<double>(plain, count))) << count;
    EXPECT_EQ(Decoded<double>(packed, count).size(), static_cast<size_t>(count));
  }
}

// Types that float_pack.h does not have go as they did.
INSTANTIATE_TEST_SUITE_P(
    All, PackedBlockTest,
    ::testing::Values(Case{DType::kFloat32, 0, 0.86}, Case{DType::kFloat32, 0.5, 0.88},
                      Case{DType::kFloat32, 0.999, 1}, Case{DType::kFloat32, 1, 0.2},
                      Case{DType::kBFloat16, 0, 0.75}, Case{DType::kBFloat16, 0.5, 0.8},
                      Case{DType::kFloat16, 0.5, 1}, Case{DType::kFloat64, 0.5, 1}));

TEST(PackedBlockTest, NoiseIsReferencedAsItIs) {
  std::mt19937 random(1);
  Bytes values(4000);
  for (std::byte& byte : values) byte = static_cast<std::byte>(random());
  TensorView view{.dtype = DType::kFloat32, .shape = {1000}};
  view.data = values.data();
  ShareWriter writer(true);
  writer.Block(view);
  GatherBuffer gathered;
  writer.AppendTo(gathered);
  EXPECT_EQ(gathered.Pieces().back().data(), values.data());
}

TEST(PackedBlockTest, CutShortTooLongOrOfAnotherCountIsRefused) {
  Bytes values = Gradient(DType::kFloat32, 300, 0.3, 5);
  const Bytes share = Written(DType::kFloat32, values, true);
  ASSERT_EQ(Decoded<float>(share, 300).size(), 300u);
  for (const int64_t count : {-1, 0, 1, 299, 384, 64 * 2000}) {
    ByteReader in(share);
    const BlockView block = ReadBlock(in, count);
    std::vector<float> back(static_cast<size_t>(std::max<int64_t>(count, 0)));
    EXPECT_FALSE(in.ok() && DecodeBlock(block, count, back.data()).ok()) << count;
  }
  for (size_t size = 0; size < share.size(); ++size) {
    EXPECT_TRUE(Decoded<float>(ByteSpan(share).first(size), 300).empty()) << size;
  }
}

TEST(PackedBlockTest, OtherTypesCannotClaimToBePacked) {
  Bytes values = Gradient(DType::kFloat32, 300, 0.3, 5);
  Bytes share = Written(DType::kFloat32, values, true);
  for (const DType dtype : {DType::kFloat64, DType::kFloat16, DType::kInt32}) {
    share[0] = static_cast<std::byte>(dtype);
    EXPECT_TRUE(Decoded<float>(share, 300).empty()) << Name(dtype);
  }
}

}  // namespace
}  // namespace dad
