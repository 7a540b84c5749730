#include "codec/float_pack.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace dad {
namespace {

using Bytes = std::vector<std::byte>;

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16};

// Patterns of float32, of which bfloat16 is the upper half.
Bytes ArrayOf(const std::vector<uint32_t>& patterns, DType dtype) {
  const size_t width = SizeOf(dtype);
  Bytes bytes(patterns.size() * width);
  for (size_t i = 0; i < patterns.size(); ++i) {
    const uint32_t value = width == 4 ? patterns[i] : patterns[i] >> 16;
    std::memcpy(bytes.data() + i * width, &value, width);
  }
  return bytes;
}

Bytes PackingOf(const Bytes& x, DType dtype) {
  const auto count = static_cast<int64_t>(x.size() / SizeOf(dtype));
  Bytes room(PackFloatsRoom(count, dtype));
  const size_t size = PackFloats(x.data(), count, dtype, room);
  EXPECT_LE(size, 1 + x.size());
  // An exact copy, so that a sanitizer sees a read beyond it.
  return Bytes(room.begin(), room.begin() + static_cast<std::ptrdiff_t>(size));
}

void ExpectComesBack(const Bytes& x, DType dtype) {
  const Bytes packed = PackingOf(x, dtype);
  Bytes back(x.size(), std::byte{0xee});
  const auto count = static_cast<int64_t>(x.size() / SizeOf(dtype));
  const Status status = UnpackFloats(packed, count, dtype, back.data());
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_EQ(back, x) << Name(dtype) << " " << count;
}

uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Values as gradients have them: `zeros` of a hundred are zero, now and then one is odd.
std::vector<uint32_t> Gradient(size_t count, int zeros, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1e-3f);
  constexpr uint32_t kOdd[] = {0x80000000, 0x7f800000, 0xff800000, 0x7fc00000,
                               0x7f800001, 0xffffffff, 0x00000001, 0x807fffff,
                               0x00800000, 0x7f7fffff, 0x3f800000};
  std::vector<uint32_t> patterns(count);
  for (uint32_t& pattern : patterns) {
    if (static_cast<int>(random() % 100) < zeros) continue;
    pattern = random() % 97 == 0 ? kOdd[random() % std::size(kOdd)] : BitsOf(normal(random));
  }
  return patterns;
}

TEST(FloatPackTest, EveryArrayComesBackBitForBit) {
  for (const DType dtype : kTypes) {
    for (const size_t count : {0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000, 4096, 10'001}) {
      for (const int zeros : {0, 1, 3, 50, 97, 100}) {
        for (uint32_t seed = 0; seed < 5; ++seed) {
          ExpectComesBack(ArrayOf(Gradient(count, zeros, seed), dtype), dtype);
        }
      }
    }
  }
}

TEST(FloatPackTest, EverySignAndExponentComesBackAmongAllOthers) {
  for (const DType dtype : kTypes) {
    for (uint32_t exponent = 0; exponent < 256; ++exponent) {
      for (uint32_t other = 0; other < 256; ++other) {
        // Most have the first exponent, so that the second is far away from it.
        std::vector<uint32_t> patterns(64, exponent << 23 | 0x123456);
        patterns[other % 64] = 0x80000000 | other << 23 | 0x7fffff;
        patterns[(other + 9) % 64] = other << 23;
        ExpectComesBack(ArrayOf(patterns, dtype), dtype);
      }
    }
  }
}

TEST(FloatPackTest, AnyBitsComeBack) {
  std::mt19937 random(1);
  for (const DType dtype : kTypes) {
    for (int i = 0; i < 2000; ++i) {
      std::vector<uint32_t> patterns(random() % 300);
      const int shift = static_cast<int>(random() % 32);  // from noise to nothing
      for (uint32_t& pattern : patterns) {
        pattern = i % 2 == 0 ? static_cast<uint32_t>(random()) >> shift
                             : static_cast<uint32_t>(random()) << shift;
      }
      ExpectComesBack(ArrayOf(patterns, dtype), dtype);
    }
  }
}

TEST(FloatPackTest, ElementsLieAtAnyAddress) {
  for (const DType dtype : kTypes) {
    Bytes shifted = ArrayOf(Gradient(1000, 20, 3), dtype);
    const Bytes x = shifted;
    const Bytes packed = PackingOf(x, dtype);
    shifted.insert(shifted.begin(), std::byte{0});
    Bytes room(PackFloatsRoom(1000, dtype) + 1);
    const std::span<std::byte> odd = std::span(room).subspan(1);
    ASSERT_EQ(PackFloats(shifted.data() + 1, 1000, dtype, odd), packed.size());
    EXPECT_EQ(std::memcmp(odd.data(), packed.data(), packed.size()), 0);
    Bytes back(x.size() + 1);
    ASSERT_TRUE(UnpackFloats(odd.first(packed.size()), 1000, dtype, back.data() + 1).ok());
    EXPECT_EQ(std::memcmp(back.data() + 1, x.data(), x.size()), 0);
  }
}

double Ratio(const Bytes& x, DType dtype) {
  return static_cast<double>(PackingOf(x, dtype).size()) / static_cast<double>(x.size());
}

TEST(FloatPackTest, NormalValuesTakeFiveSixths) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.01f);
  std::vector<uint32_t> patterns(64'000);
  for (uint32_t& pattern : patterns) pattern = BitsOf(normal(random));
  EXPECT_LT(Ratio(ArrayOf(patterns, DType::kFloat32), DType::kFloat32), 0.85);
  EXPECT_LT(Ratio(ArrayOf(patterns, DType::kBFloat16), DType::kBFloat16), 0.69);
}

TEST(FloatPackTest, ZerosTakeABitAndWholeBlocksOfThemAByte) {
  EXPECT_EQ(PackingOf(Bytes(64 * 100 * 4), DType::kFloat32).size(), 1u + 100u);
  // One byte for the mask, eight of it, and a value in nine or ten.
  std::vector<uint32_t> patterns(6400);
  for (size_t i = 0; i < patterns.size(); i += 64) patterns[i] = BitsOf(1.5f);
  EXPECT_LE(PackingOf(ArrayOf(patterns, DType::kFloat32), DType::kFloat32).size(), 1u + 100u * 15u);
}

TEST(FloatPackTest, WhatWouldGrowTakesOneByteMore) {
  for (const DType dtype : kTypes) {
    std::mt19937 random(1);
    std::vector<uint32_t> patterns(1000);
    for (uint32_t& pattern : patterns) pattern = static_cast<uint32_t>(random());
    const Bytes x = ArrayOf(patterns, dtype);
    EXPECT_EQ(PackingOf(x, dtype).size(), 1 + x.size());
  }
  EXPECT_EQ(PackingOf({}, DType::kFloat32).size(), 1u);
}

TEST(FloatPackTest, WrongLengthsAreRejected) {
  for (const DType dtype : kTypes) {
    for (const int zeros : {0, 40, 100}) {
      for (const size_t count : {1, 64, 65, 200, 1000}) {
        const Bytes x = ArrayOf(Gradient(count, zeros, 2), dtype);
        const Bytes packed = PackingOf(x, dtype);
        Bytes back(x.size() + 64 * SizeOf(dtype));
        const auto n = static_cast<int64_t>(count);
        for (size_t size = 0; size < packed.size(); ++size) {
          const Bytes prefix(packed.begin(), packed.begin() + static_cast<std::ptrdiff_t>(size));
          ASSERT_EQ(UnpackFloats(prefix, n, dtype, back.data()).code(),
                    StatusCode::kInvalidArgument)
              << size << " of " << packed.size();
        }
        Bytes longer = packed;
        longer.push_back(std::byte{0});
        EXPECT_FALSE(UnpackFloats(longer, n, dtype, back.data()).ok());
        EXPECT_FALSE(UnpackFloats(packed, n + 64, dtype, back.data()).ok());
      }
    }
  }
}

Bytes BytesOf(std::initializer_list<int> values) {
  Bytes bytes;
  for (int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

// Two elements of bfloat16 around an exponent of 127.
TEST(FloatPackTest, EveryKindOfBlockIsReadAsDocumented) {
  const auto read = [](const Bytes& bytes) -> std::vector<uint16_t> {
    std::vector<uint16_t> back(2, 0xeeee);
    if (!UnpackFloats(bytes, 2, DType::kBFloat16, back.data()).ok()) return {};
    return back;
  };
  using Values = std::vector<uint16_t>;
  EXPECT_EQ(read(BytesOf({0, 1, 2, 3, 4})), (Values{0x0201, 0x0403}));
  EXPECT_EQ(read(BytesOf({1, 0})), (Values{0, 0}));
  EXPECT_EQ(read(BytesOf({1, 255, 1, 2, 3, 4})), (Values{0x0201, 0x0403}));
  EXPECT_EQ(read(BytesOf({1, 1, 2, 255, 1, 2})), (Values{0, 0x0201}));
  // Exponents c and c - 2; the second is negative.
  EXPECT_EQ(read(BytesOf({1, 127, 0x11, 0x82, 0, 2})),
            (Values{127 << 7 | 0x11, 0x8000 | 125 << 7 | 0x02}));
  // The example of the documentation: 1 and -2^-10.
  EXPECT_EQ(read(BytesOf({1, 127, 0x00, 0x80, 2, 2, 0x78})), (Values{0x3f80, 0x8000 | 117 << 7}));
  // Both far: c - 3 is v = 1, c + 2 is v = 4.
  EXPECT_EQ(read(BytesOf({1, 127, 0, 0, 3, 3, 0b001001})), (Values{124 << 7, 129 << 7}));

  for (const Bytes& bad : {
           BytesOf({2, 0}),                            // no such form
           BytesOf({1, 1, 0}),                         // a mask of nothing
           BytesOf({1, 1, 4, 255, 1, 2}),              // a bit behind the last element
           BytesOf({1, 1, 2, 0}),                      // what a mask leaves is no block of zeros
           BytesOf({1, 1, 2, 1, 1, 255, 1, 2}),        // nor masked again
           BytesOf({1, 127, 0, 0, 4, 0}),              // a code behind the last element
           BytesOf({1, 127, 0, 0, 3, 3, 0b1000001}),   // an unused bit
           BytesOf({1, 127, 0, 0, 3, 3, 0, 0, 0, 0}),  // no such number
           BytesOf({1, 2, 0, 0, 1, 1, 0b1}),           // an exponent below 0
           BytesOf({1, 254, 0, 0, 1, 1, 0b100, 0b0}),  // and one above 255
       }) {
    EXPECT_EQ(read(bad), Values{}) << static_cast<int>(bad[1]) << " of " << bad.size();
  }
}

}  // namespace
}  // namespace dad
