#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec/factor_wire.h"
#include "codec/int_quantise.h"
#include "codec/zero_mask.h"
#include "matrix_fixture.h"

namespace dad {
namespace {

using matrix_test::Matrix;
using matrix_test::SameBits;

using Bytes = std::vector<std::byte>;

Bytes RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 0xff);
  return bytes;
}

// An exact copy of the first bytes, so that a sanitizer sees a read beyond them.
Bytes Prefix(const Bytes& bytes, size_t size) {
  return Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
}

constexpr Wire kWires[] = {Wire::kFp32, Wire::kBf16, Wire::kInt8, Wire::kInt4};

template <typename T>
constexpr DType kDType = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;

template <typename T>
Bytes Encode(Wire wire, const Matrix<T>& x, MatrixView<T> decoded = {}) {
  Bytes bytes(EncodedBytes(wire, x.rows(), x.cols(), kDType<T>));
  EncodeFactors(wire, x.View(), bytes, decoded);
  return bytes;
}

template <typename T>
class CodecTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(CodecTest, Types);

TEST(FactorWireTest, NamesAreParsedBack) {
  for (const Wire wire : kWires) {
    const Result<Wire> parsed = ParseWire(Name(wire));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(parsed.value(), wire);
  }
  EXPECT_EQ(ParseWire("fp8").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseWire("").status().code(), StatusCode::kInvalidArgument);
}

TEST(FactorWireTest, SizesAreAsTheHeaderSays) {
  EXPECT_EQ(EncodedBytes(Wire::kFp32, 3, 5, DType::kFloat32), 60u);
  EXPECT_EQ(EncodedBytes(Wire::kFp32, 3, 5, DType::kFloat64), 120u);
  EXPECT_EQ(EncodedBytes(Wire::kFp32, 3, 5, DType::kBFloat16), 60u);
  EXPECT_EQ(EncodedBytes(Wire::kBf16, 3, 5, DType::kFloat64), 30u);
  EXPECT_EQ(EncodedBytes(Wire::kInt8, 3, 5, DType::kFloat64), 27u);
  EXPECT_EQ(EncodedBytes(Wire::kInt4, 3, 5, DType::kFloat32), 21u);
  EXPECT_EQ(EncodedBytes(Wire::kInt4, 3, 6, DType::kFloat32), 21u);
  EXPECT_EQ(EncodedBytes(Wire::kInt4, 0, 6, DType::kFloat32), 0u);
}

TYPED_TEST(CodecTest, FactorsComeBackWithinHalfAStepAndAsTheSenderWasTold) {
  using T = TypeParam;
  for (const Wire wire : kWires) {
    for (const int64_t k : {0, 1, 4}) {
      for (const int64_t n : {0, 1, 7, 33, 1025}) {
        auto x = Matrix<T>::Random(k, n, 1, 2);
        if (k > 1) {
          for (int64_t j = 0; j < n; ++j) x.at(1, j) = 0;
        }
        Matrix<T> told(k, n, 1), decoded(k, n, 3);
        const Bytes bytes = Encode(wire, x, told.View());
        ASSERT_TRUE(DecodeFactors(wire, bytes, decoded.View()).ok());
        EXPECT_TRUE(SameBits(told, decoded)) << Name(wire);
        EXPECT_TRUE(told.GapsAreIntact() && decoded.GapsAreIntact());
        for (int64_t i = 0; i < k; ++i) {
          double largest = 0;
          for (int64_t j = 0; j < n; ++j) {
            largest = std::max(largest, std::abs(static_cast<double>(x.at(i, j))));
          }
          for (int64_t j = 0; j < n; ++j) {
            const double value = x.at(i, j);
            const double step = wire == Wire::kFp32   ? 0
                                : wire == Wire::kBf16 ? std::abs(value) * 0x1p-8
                                : wire == Wire::kInt8 ? largest / 254 * (1 + 1e-4)
                                                      : largest / 14 * (1 + 1e-4);
            ASSERT_NEAR(decoded.at(i, j), value, step) << Name(wire) << " " << i << ", " << j;
          }
        }
      }
    }
  }
}

TYPED_TEST(CodecTest, FactorsMayBeRoundedInPlace) {
  using T = TypeParam;
  for (const Wire wire : kWires) {
    auto x = Matrix<T>::Random(3, 1025, 1);
    Matrix<T> told(3, 1025);
    const Bytes apart = Encode(wire, x, told.View());
    const Bytes in_place = Encode(wire, x, x.View());
    EXPECT_EQ(apart, in_place);
    EXPECT_TRUE(SameBits(x, told));
    // What was rounded once stays: a relay may encode it again.
    Matrix<T> again(3, 1025);
    const Bytes twice = Encode(wire, told, again.View());
    ASSERT_TRUE(DecodeFactors(wire, twice, again.View()).ok());
    double worst = 0;
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t j = 0; j < 1025; ++j) {
        worst = std::max(worst, std::abs(static_cast<double>(again.at(i, j) - told.at(i, j))));
      }
    }
    EXPECT_LE(worst, 1e-6);
  }
}

TYPED_TEST(CodecTest, DirectionsThatAreNotFiniteDecodeToNaNAndOthersDoNot) {
  using T = TypeParam;
  for (const Wire wire : {Wire::kInt8, Wire::kInt4}) {
    for (const T bad : {std::numeric_limits<T>::infinity(), std::numeric_limits<T>::quiet_NaN()}) {
      auto x = Matrix<T>::Random(3, 33, 1);
      x.at(1, 5) = bad;
      Matrix<T> told(3, 33), decoded(3, 33);
      const Bytes bytes = Encode(wire, x, told.View());
      ASSERT_TRUE(DecodeFactors(wire, bytes, decoded.View()).ok());
      EXPECT_TRUE(SameBits(told, decoded));
      for (int64_t j = 0; j < 33; ++j) {
        EXPECT_TRUE(std::isnan(decoded.at(1, j)));
        EXPECT_FALSE(std::isnan(decoded.at(0, j)));
      }
    }
  }
}

TYPED_TEST(CodecTest, TinyDirectionsGoAsZero) {
  using T = TypeParam;
  for (const Wire wire : {Wire::kInt8, Wire::kInt4}) {
    Matrix<T> x(1, 9), decoded(1, 9);
    x.Fill(static_cast<T>(std::numeric_limits<float>::denorm_min() * 8));
    ASSERT_TRUE(DecodeFactors(wire, Encode(wire, x), decoded.View()).ok());
    EXPECT_EQ(decoded.SquaredNorm(), 0);
    x.Fill(std::numeric_limits<float>::max());
    ASSERT_TRUE(DecodeFactors(wire, Encode(wire, x), decoded.View()).ok());
    EXPECT_NEAR(decoded.at(0, 3) / x.at(0, 3), 1, 1e-6);
  }
}

TYPED_TEST(CodecTest, FactorsOfWrongLengthAreRejected) {
  using T = TypeParam;
  for (const Wire wire : kWires) {
    const auto x = Matrix<T>::Random(3, 7, 1);
    Bytes bytes = Encode(wire, x);
    Matrix<T> decoded(3, 7);
    for (size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_EQ(DecodeFactors(wire, Prefix(bytes, size), decoded.View()).code(),
                StatusCode::kInvalidArgument);
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(DecodeFactors(wire, bytes, decoded.View()).ok());
  }
}

TYPED_TEST(CodecTest, RandomBytesAreDecodedOrRejected) {
  using T = TypeParam;
  for (const Wire wire : kWires) {
    for (uint32_t seed = 0; seed < 200; ++seed) {
      const int64_t k = seed % 4, n = (seed * 7) % 40;
      Matrix<T> decoded(k, n);
      const size_t right = EncodedBytes(wire, k, n, kDType<T>);
      (void)DecodeFactors(wire, RandomBytes(right, seed), decoded.View());
      EXPECT_FALSE(DecodeFactors(wire, RandomBytes(right + 1 + seed, seed), decoded.View()).ok());
    }
  }
}

TEST(FactorWireTest, ValuesOutOfRangeAreRejected) {
  Matrix<float> x(1, 3);
  x.Fill(1);
  for (const Wire wire : {Wire::kInt8, Wire::kInt4}) {
    const Bytes good = Encode(wire, x);
    ASSERT_TRUE(DecodeFactors(wire, good, x.View()).ok());
    Bytes bad = good;
    bad[4] = wire == Wire::kInt8 ? std::byte{0x80} : std::byte{0x18};  // -128, -8
    EXPECT_FALSE(DecodeFactors(wire, bad, x.View()).ok());
    for (const float scale : {-1.0f, -0.0f, std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::denorm_min()}) {
      bad = good;
      std::memcpy(bad.data(), &scale, sizeof scale);
      EXPECT_FALSE(DecodeFactors(wire, bad, x.View()).ok()) << scale;
    }
  }
  Bytes padded = Encode(Wire::kInt4, x);
  padded.back() |= std::byte{0x10};  // the half byte behind the last value
  EXPECT_FALSE(DecodeFactors(Wire::kInt4, padded, x.View()).ok());
}

TYPED_TEST(CodecTest, Int8ComesBackWithinHalfAStepAndAsTheSenderWasTold) {
  using T = TypeParam;
  for (const int64_t count : {0, 1, 7, 33, 1025, 5000}) {
    for (const int64_t bucket : {1, 7, 64, 1024, 10000}) {
      auto x = Matrix<T>::Random(1, count, 3);
      for (int64_t i = 0; i < std::min<int64_t>(count, 64); ++i) x.at(0, i) = 0;
      Matrix<T> told(1, count), decoded(1, count), summed = Matrix<T>::Random(1, count, 4);
      const Matrix<T> before = summed;
      Bytes bytes(QuantisedBytes(count, bucket));
      QuantiseInt8<T>(x.View().data, count, bucket, bytes, told.View().data);
      ASSERT_TRUE(DequantiseInt8(bytes, count, bucket, decoded.View().data).ok());
      EXPECT_TRUE(SameBits(told, decoded));
      ASSERT_TRUE(AddDequantisedInt8(bytes, count, bucket, summed.View().data).ok());
      for (int64_t begin = 0; begin < count; begin += bucket) {
        const int64_t end = std::min(count, begin + bucket);
        double largest = 0;
        for (int64_t i = begin; i < end; ++i) {
          largest = std::max(largest, std::abs(static_cast<double>(x.at(0, i))));
        }
        for (int64_t i = begin; i < end; ++i) {
          ASSERT_NEAR(decoded.at(0, i), x.at(0, i), largest / 254 * (1 + 1e-4));
          ASSERT_EQ(summed.at(0, i), before.at(0, i) + decoded.at(0, i));
        }
      }
      // In place.
      QuantiseInt8<T>(x.View().data, count, bucket, bytes, x.View().data);
      EXPECT_TRUE(SameBits(x, told));
    }
  }
}

TYPED_TEST(CodecTest, Int8RoundsHalvesToEven) {
  using T = TypeParam;
  const std::vector<T> x = {T(127), T(0.5), T(1.5), T(2.5), T(-0.5), T(-1.5), T(-126.5), T(126.5)};
  const std::vector<T> expected = {127, 0, 2, 2, 0, -2, -126, 126};
  std::vector<T> decoded(x.size());
  const auto count = static_cast<int64_t>(x.size());
  Bytes bytes(QuantisedBytes(count, 100));
  QuantiseInt8<T>(x.data(), count, 100, bytes, decoded.data());
  EXPECT_EQ(decoded, expected);
}

TYPED_TEST(CodecTest, Int8OfWrongLengthOrRangeIsRejected) {
  using T = TypeParam;
  const auto x = Matrix<T>::Random(1, 20, 1);
  Bytes bytes(QuantisedBytes(20, 6));
  EXPECT_EQ(bytes.size(), 36u);
  QuantiseInt8<T>(x.View().data, 20, 6, bytes);
  std::vector<T> decoded(20, T(5));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(DequantiseInt8(Prefix(bytes, size), 20, 6, decoded.data()).code(),
              StatusCode::kInvalidArgument);
  }
  Bytes longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(DequantiseInt8(longer, 20, 6, decoded.data()).ok());
  EXPECT_FALSE(DequantiseInt8(bytes, 20, 0, decoded.data()).ok());
  EXPECT_FALSE(DequantiseInt8(bytes, -20, 6, decoded.data()).ok());
  bytes.back() = std::byte{0x80};
  EXPECT_FALSE(AddDequantisedInt8(bytes, 20, 6, decoded.data()).ok());
  EXPECT_EQ(decoded, std::vector<T>(20, T(5))) << "an error must leave the sum alone";
}

TYPED_TEST(CodecTest, RandomBytesAsInt8AreDecodedOrRejected) {
  using T = TypeParam;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    const int64_t count = seed % 50, bucket = 1 + seed % 9;
    std::vector<T> decoded(static_cast<size_t>(count));
    (void)DequantiseInt8(RandomBytes(QuantisedBytes(count, bucket), seed), count, bucket,
                         decoded.data());
    (void)DequantiseInt8(RandomBytes(seed % 97, seed), count, bucket, decoded.data());
  }
}

// Elements of a given width with `zeros` of a hundred being zero; among the others are the
// patterns that only look like zero.
Bytes Sparse(int64_t count, size_t width, int zeros, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(static_cast<size_t>(count) * width);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    if (static_cast<int>(random() % 100) < zeros) continue;
    const uint64_t negative_zero = uint64_t{1} << (8 * width - 1);
    const uint64_t value = random() % 8 == 0 ? negative_zero : 1 + random();
    std::memcpy(bytes.data() + i * width, &value, width);
  }
  return bytes;
}

constexpr DType kMaskedTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                                  DType::kFloat64};

TEST(ZeroMaskTest, EveryArrayComesBackBitForBit) {
  for (const DType dtype : kMaskedTypes) {
    for (const int64_t count : {0, 1, 7, 8, 33, 63, 64, 65, 128, 1025, 5000}) {
      for (const int zeros : {0, 3, 50, 97, 100}) {
        const Bytes x = Sparse(count, SizeOf(dtype), zeros, 1);
        Bytes packed(PackedBytes(x.data(), count, dtype));
        PackZeros(x.data(), count, dtype, packed);
        EXPECT_LE(packed.size(), 1 + x.size());
        Bytes back(x.size(), std::byte{0xee});
        ASSERT_TRUE(UnpackZeros(packed, count, dtype, back.data()).ok());
        EXPECT_EQ(back, x) << Name(dtype) << " " << count << " zeros " << zeros;
      }
    }
  }
}

TEST(ZeroMaskTest, MinusZeroAndNaNSurvive) {
  std::vector<float> x(1000, 0.0f);
  x[3] = -0.0f;
  x[700] = std::numeric_limits<float>::quiet_NaN();
  Bytes packed(PackedBytes(x.data(), 1000, DType::kFloat32));
  EXPECT_EQ(packed.size(), 1u + 125u + 8u);
  PackZeros(x.data(), 1000, DType::kFloat32, packed);
  std::vector<float> back(1000, 1.0f);
  ASSERT_TRUE(UnpackZeros(packed, 1000, DType::kFloat32, back.data()).ok());
  EXPECT_EQ(std::memcmp(x.data(), back.data(), 4000), 0);
}

TEST(ZeroMaskTest, DenseArraysGrowByOneByte) {
  const std::vector<double> x(100, 1.0);
  EXPECT_EQ(PackedBytes(x.data(), 100, DType::kFloat64), 801u);
  const std::vector<double> zeros(100, 0.0);
  EXPECT_EQ(PackedBytes(zeros.data(), 100, DType::kFloat64), 14u);
}

TEST(ZeroMaskTest, WrongLengthsAndStrayBitsAreRejected) {
  for (const DType dtype : kMaskedTypes) {
    for (const int zeros : {0, 60}) {
      const Bytes x = Sparse(100, SizeOf(dtype), zeros, 2);
      Bytes packed(PackedBytes(x.data(), 100, dtype));
      PackZeros(x.data(), 100, dtype, packed);
      Bytes back(x.size());
      for (size_t size = 0; size < packed.size(); ++size) {
        EXPECT_EQ(UnpackZeros(Prefix(packed, size), 100, dtype, back.data()).code(),
                  StatusCode::kInvalidArgument);
      }
      Bytes longer = packed;
      longer.push_back(std::byte{0});
      EXPECT_FALSE(UnpackZeros(longer, 100, dtype, back.data()).ok());
      Bytes other_form = packed;
      other_form[0] = std::byte{2};
      EXPECT_FALSE(UnpackZeros(other_form, 100, dtype, back.data()).ok());
      if (zeros == 0) continue;
      Bytes stray = packed;
      stray[13] |= std::byte{0x80};  // the bitmap's last byte has 4 elements
      EXPECT_FALSE(UnpackZeros(stray, 100, dtype, back.data()).ok());
    }
  }
}

TEST(ZeroMaskTest, RandomBytesAreDecodedOrRejected) {
  for (const DType dtype : kMaskedTypes) {
    for (uint32_t seed = 0; seed < 500; ++seed) {
      const int64_t count = seed % 70;
      Bytes bytes = RandomBytes(seed % 300, seed);
      if (!bytes.empty()) bytes[0] = static_cast<std::byte>(seed % 3);
      Bytes back(static_cast<size_t>(count) * SizeOf(dtype));
      (void)UnpackZeros(bytes, count, dtype, back.data());
    }
  }
}

}  // namespace
}  // namespace dad
