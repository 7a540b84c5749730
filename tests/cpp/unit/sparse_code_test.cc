#include "codec/sparse_code.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace dad {
namespace {

using Bytes = std::vector<std::byte>;

constexpr Coding kCodings[] = {Coding::kWord, Coding::kRice};
constexpr int kWidths[] = {0, 1, 2, 3, 4, 7, 8};

struct Elements {
  std::vector<uint32_t> index;
  std::vector<uint8_t> code;

  bool operator==(const Elements&) const = default;
};

// Random codes for given indices.
Elements WithCodes(std::vector<uint32_t> index, int value_bits, uint32_t seed = 1) {
  std::mt19937 random(seed);
  Elements elements{std::move(index), {}};
  if (value_bits == 0) return elements;
  for (size_t i = 0; i < elements.index.size(); ++i) {
    elements.code.push_back(static_cast<uint8_t>(random() & ((1u << value_bits) - 1)));
  }
  return elements;
}

// Elements that are chosen with probability `density`.
std::vector<uint32_t> RandomIndex(int64_t extent, double density, uint32_t seed) {
  std::mt19937 random(seed);
  std::geometric_distribution<int64_t> gap(density);
  std::vector<uint32_t> index;
  for (int64_t i = gap(random); i < extent; i += 1 + gap(random)) {
    index.push_back(static_cast<uint32_t>(i));
  }
  return index;
}

Bytes Encode(Coding coding, int64_t extent, const Elements& elements, int value_bits) {
  Bytes bytes;
  EncodeSparse(coding, extent, elements.index, elements.code, value_bits, bytes);
  return bytes;
}

Status Decode(Coding coding, int64_t extent, const Bytes& bytes, int value_bits,
              Elements* elements) {
  ByteReader in(bytes);
  DAD_RETURN_IF_ERROR(
      DecodeSparse(coding, extent, value_bits, in, elements->index, elements->code));
  return in.AtEnd() ? Status::Ok() : Status::InvalidArgument("bytes are left");
}

// An exact copy of the first bytes, so that a sanitizer sees a read beyond them.
Bytes Prefix(const Bytes& bytes, size_t size) {
  return Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
}

Bytes FromHex(const std::string& hex) {
  Bytes bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 3) {
    bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

// What a reader of the header's text would write: a bit at a time.
class PlainRice {
 public:
  static Bytes Encode(const Elements& elements, int value_bits, int k) {
    ByteWriter head;
    head.Varint(elements.index.size());
    PlainRice codes, gaps;
    uint64_t next = 0;
    for (size_t i = 0; i < elements.index.size(); ++i) {
      if (value_bits > 0) codes.Put(elements.code[i], value_bits);
      const uint64_t gap = elements.index[i] - next;
      next = uint64_t{elements.index[i]} + 1;
      for (uint64_t zeros = gap >> k; zeros > 0; --zeros) gaps.Put(0, 1);
      gaps.Put(1, 1);
      gaps.Put(gap, k);
    }
    if (!elements.index.empty()) head.Value(static_cast<uint8_t>(k));
    Bytes bytes = head.bytes();
    bytes.insert(bytes.end(), codes.bytes_.begin(), codes.bytes_.end());
    bytes.insert(bytes.end(), gaps.bytes_.begin(), gaps.bytes_.end());
    return bytes;
  }

 private:
  void Put(uint64_t value, int num_bits) {
    for (int i = 0; i < num_bits; ++i, ++size_) {
      if (size_ % 8 == 0) bytes_.push_back(std::byte{0});
      if ((value >> i & 1) != 0) bytes_.back() |= std::byte{1} << (size_ % 8);
    }
  }
  Bytes bytes_;
  size_t size_ = 0;
};

size_t FewestBytes(const Elements& elements, int value_bits) {
  size_t fewest = ~size_t{0};
  for (int k = 0; k <= 31; ++k) {
    // Quotients of huge gaps would take forever, and are no candidates.
    if (elements.index.back() >> k > 1'000'000) continue;
    fewest = std::min(fewest, PlainRice::Encode(elements, value_bits, k).size());
  }
  return fewest;
}

void ExpectRoundTrip(int64_t extent, const std::vector<uint32_t>& index) {
  for (const Coding coding : kCodings) {
    for (const int value_bits : kWidths) {
      SCOPED_TRACE("coding " + std::to_string(static_cast<int>(coding)) + ", value_bits " +
                   std::to_string(value_bits) + ", extent " + std::to_string(extent) + ", count " +
                   std::to_string(index.size()));
      if (extent > MaxSparseExtent(value_bits)) continue;
      const Elements elements = WithCodes(index, value_bits);
      const Bytes bytes = Encode(coding, extent, elements, value_bits);
      EXPECT_EQ(static_cast<int64_t>(bytes.size()), SparseBytes(coding, index, value_bits));
      Elements decoded{{1, 2, 3}, {4, 5}};  // what was there before is of no account
      const Status status = Decode(coding, extent, bytes, value_bits, &decoded);
      ASSERT_TRUE(status.ok()) << status.ToString();
      ASSERT_TRUE(decoded == elements);

      ByteReader in(bytes);
      SparseReader reader(coding, extent, value_bits, in);
      EXPECT_EQ(reader.count(), static_cast<int64_t>(index.size()));
      Elements in_blocks;
      while (reader.Next()) {
        in_blocks.index.insert(in_blocks.index.end(), reader.index().begin(), reader.index().end());
        in_blocks.code.insert(in_blocks.code.end(), reader.code().begin(), reader.code().end());
      }
      EXPECT_TRUE(reader.status().ok() && in.AtEnd());
      ASSERT_TRUE(in_blocks == elements);
    }
  }
}

TEST(SparseCodeTest, ElementsComeBackAtAllDensities) {
  for (const double density : {1.0, 0.99, 0.7, 0.5, 0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5}) {
    for (const int64_t extent : {1, 2, 7, 64, 1000, 100'000}) {
      for (uint32_t seed = 0; seed < 3; ++seed) {
        ExpectRoundTrip(extent, RandomIndex(extent, density, seed));
      }
    }
  }
}

TEST(SparseCodeTest, AllNumbersOfElementsAroundABlockComeBack) {
  for (size_t count : {0u, 1u, 2u, 3u, 7u, 8u, 9u, 15u, 16u, 17u, 63u, 64u, 65u}) {
    ExpectRoundTrip(1'000'000, RandomIndex(static_cast<int64_t>(100 * count), 0.01, 1));
  }
  for (size_t count = SparseReader::kBlock - 2; count < SparseReader::kBlock + 3; ++count) {
    for (const size_t blocks : {0u, 1u, 2u}) {
      std::vector<uint32_t> index(count + blocks * SparseReader::kBlock);
      std::iota(index.begin(), index.end(), 0);
      ExpectRoundTrip(static_cast<int64_t>(index.size()), index);
      for (uint32_t& i : index) i *= 37;
      ExpectRoundTrip(37 * static_cast<int64_t>(index.size()), index);
    }
  }
}

TEST(SparseCodeTest, TheEdgesOfATensorAreElementsLikeAnyOther) {
  for (const int64_t extent : {int64_t{1}, int64_t{2}, int64_t{1000}, MaxSparseExtent(4),
                               MaxSparseExtent(1), MaxSparseExtent(0)}) {
    const auto last = static_cast<uint32_t>(extent - 1);
    ExpectRoundTrip(extent, {});
    ExpectRoundTrip(extent, {0});
    ExpectRoundTrip(extent, {last});
    if (extent > 1) ExpectRoundTrip(extent, {0, last});
    if (extent > 2) ExpectRoundTrip(extent, {last - 1, last});
    if (extent > 2) ExpectRoundTrip(extent, {0, 1, last});
  }
  ExpectRoundTrip(0, {});
}

// Quotients far beyond a word, at every place within a byte.
TEST(SparseCodeTest, LongGapsAmongShortOnesComeBack) {
  for (const uint32_t jump : {40u, 56u, 57u, 58u, 63u, 64u, 65u, 100u, 1000u, 100'000u}) {
    for (uint32_t before = 1; before < 20; ++before) {
      std::vector<uint32_t> index;
      for (uint32_t i = 0; i < 3000; ++i) {
        index.push_back((index.empty() ? 0 : index.back() + 1) + (i == before ? jump : i % 3 / 2));
      }
      ExpectRoundTrip(int64_t{index.back()} + 1, index);
      index.push_back(index.back() + jump);  // and as the last one
      ExpectRoundTrip(int64_t{index.back()} + 1, index);
    }
  }
}

TEST(SparseCodeTest, RiceCodeIsWhatTheHeaderSays) {
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    const double density = std::pow(0.7, 1 + random() % 20);
    std::vector<uint32_t> index = RandomIndex(20'000, density, random());
    // Clusters: gaps that are far from geometric.
    if (round % 3 == 0) std::erase_if(index, [](uint32_t i) { return i / 512 % 4 != 1; });
    if (index.empty()) continue;
    for (const int value_bits : kWidths) {
      const Elements elements = WithCodes(index, value_bits, random());
      const Bytes bytes = Encode(Coding::kRice, 20'000, elements, value_bits);
      ByteReader in(bytes);
      (void)in.Varint();
      const int k = in.Value<uint8_t>();
      EXPECT_EQ(bytes, PlainRice::Encode(elements, value_bits, k));
      EXPECT_EQ(bytes.size(), FewestBytes(elements, value_bits)) << "density " << density;
      // Every k decodes.
      for (int other = 0; other <= 31; ++other) {
        Elements decoded;
        const Bytes plain = PlainRice::Encode(elements, value_bits, other);
        ASSERT_TRUE(Decode(Coding::kRice, 20'000, plain, value_bits, &decoded).ok());
        ASSERT_TRUE(decoded == elements);
      }
    }
  }
}

// The example of docs/wire_format.md.
TEST(SparseCodeTest, BytesAreThoseOfTheExample) {
  const Elements four{{3, 4, 9, 30}, {0x1, 0x9, 0x0, 0xf}};
  EXPECT_EQ(Encode(Coding::kWord, 32, four, 4),
            FromHex("04 03 00 00 10 04 00 00 90 09 00 00 00 1e 00 00 f0 "));
  EXPECT_EQ(Encode(Coding::kRice, 32, four, 4), FromHex("04 02 91 f0 8f 80 00 "));
  const Elements one{{3, 4, 9, 30}, {0, 1, 0, 1}};
  EXPECT_EQ(Encode(Coding::kWord, 32, one, 1),
            FromHex("04 03 00 00 00 04 00 00 80 09 00 00 00 1e 00 00 80 "));
  EXPECT_EQ(Encode(Coding::kRice, 32, one, 1), FromHex("04 02 0a 8f 80 00 "));
  const Elements none{{3, 4, 9, 30}, {}};
  EXPECT_EQ(Encode(Coding::kRice, 32, none, 0), FromHex("04 02 8f 80 00 "));
  for (const Coding coding : kCodings) {
    EXPECT_EQ(Encode(coding, 32, {}, 4), FromHex("00 "));
  }
}

TEST(SparseCodeTest, AppendsToWhatIsThereAndLeavesWhatFollows) {
  const Elements first = WithCodes(RandomIndex(5000, 0.1, 1), 4);
  const Elements second = WithCodes(RandomIndex(3000, 0.01, 2), 1);
  for (const Coding coding : kCodings) {
    Bytes bytes = FromHex("aa bb ");
    EncodeSparse(coding, 5000, first.index, first.code, 4, bytes);
    EncodeSparse(coding, 3000, second.index, second.code, 1, bytes);
    bytes.push_back(std::byte{0xcc});
    ByteReader in(bytes);
    EXPECT_EQ(in.Value<uint16_t>(), 0xbbaa);
    Elements decoded;
    ASSERT_TRUE(DecodeSparse(coding, 5000, 4, in, decoded.index, decoded.code).ok());
    EXPECT_TRUE(decoded == first);
    ASSERT_TRUE(DecodeSparse(coding, 3000, 1, in, decoded.index, decoded.code).ok());
    EXPECT_TRUE(decoded == second);
    EXPECT_EQ(in.Value<uint8_t>(), 0xcc);
    EXPECT_TRUE(in.AtEnd());
  }
}

TEST(SparseCodeTest, EveryTruncationIsRefused) {
  for (const Coding coding : kCodings) {
    for (const int value_bits : kWidths) {
      for (const double density : {0.9, 0.2, 0.01}) {
        const Elements elements = WithCodes(RandomIndex(2000, density, 1), value_bits);
        const Bytes bytes = Encode(coding, 2000, elements, value_bits);
        for (size_t size = 0; size < bytes.size(); ++size) {
          Elements decoded;
          const Bytes prefix = Prefix(bytes, size);
          ByteReader in(prefix);
          const Status status =
              DecodeSparse(coding, 2000, value_bits, in, decoded.index, decoded.code);
          ASSERT_EQ(status.code(), StatusCode::kInvalidArgument) << size;
          ASSERT_FALSE(in.ok());
        }
      }
    }
  }
}

TEST(SparseCodeTest, FlippedBitsGiveElementsOrAnError) {
  for (const Coding coding : kCodings) {
    for (const int value_bits : kWidths) {
      const Elements elements = WithCodes(RandomIndex(3000, 0.05, 3), value_bits);
      const Bytes good = Encode(coding, 3000, elements, value_bits);
      for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
        Bytes bad = good;
        bad[bit / 8] ^= std::byte{1} << (bit % 8);
        Elements decoded;
        if (!Decode(coding, 3000, bad, value_bits, &decoded).ok()) continue;
        ASSERT_TRUE(std::is_sorted(decoded.index.begin(), decoded.index.end()));
        ASSERT_TRUE(decoded.index.empty() || decoded.index.back() < 3000);
        ASSERT_FALSE(decoded == elements);
      }
    }
  }
}

TEST(SparseCodeTest, RandomBytesGiveElementsOrAnError) {
  std::mt19937 random(11);
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes(random() % 60);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random() & random() & 0xff);
    if (!bytes.empty()) bytes[0] &= std::byte{0x1f};
    if (bytes.size() > 1) bytes[1] &= std::byte{0x27};
    const Coding coding = kCodings[round % 2];
    const int value_bits = kWidths[round % 3];
    Elements decoded;
    ByteReader in(bytes);
    const Status status = DecodeSparse(coding, 500, value_bits, in, decoded.index, decoded.code);
    if (!status.ok()) continue;
    for (size_t i = 0; i < decoded.index.size(); ++i) {
      ASSERT_LT(decoded.index[i], 500u);
      ASSERT_TRUE(i == 0 || decoded.index[i] > decoded.index[i - 1]);
    }
  }
}

void ExpectRefused(Coding coding, int64_t extent, int value_bits, const std::string& hex) {
  Elements decoded;
  const Bytes bytes = FromHex(hex);
  ByteReader in(bytes);
  const Status status = DecodeSparse(coding, extent, value_bits, in, decoded.index, decoded.code);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << hex;
  EXPECT_FALSE(in.ok());
  // And nothing was made room for on a mere claim.
  EXPECT_LE(decoded.index.capacity(), 8 * bytes.size());
}

TEST(SparseCodeTest, WhatIsMalformedIsRefused) {
  // Words that fall, repeat or are outside.
  ExpectRefused(Coding::kWord, 32, 4, "02 04 00 00 10 03 00 00 10 ");
  ExpectRefused(Coding::kWord, 32, 4, "02 04 00 00 10 04 00 00 90 ");
  ExpectRefused(Coding::kWord, 30, 4, "01 1e 00 00 10 ");
  ExpectRefused(Coding::kWord, 30, 0, "01 1e 00 00 00 ");
  ExpectRefused(Coding::kWord, 0, 0, "01 00 00 00 00 ");
  // Counts that the bytes or the tensor cannot hold.
  ExpectRefused(Coding::kWord, MaxSparseExtent(0), 0, "ff ff ff ff 0f 00 00 00 00 ");
  ExpectRefused(Coding::kRice, MaxSparseExtent(0), 0, "ff ff ff ff 0f 00 ff ff ff ff ff ");
  ExpectRefused(Coding::kRice, MaxSparseExtent(0), 0,
                "ff ff ff ff ff ff ff ff ff 01 00 ff ff ff ff ff ");
  ExpectRefused(Coding::kRice, 8, 0, "09 00 ff ff ");
  // A Rice parameter out of range.
  ExpectRefused(Coding::kRice, 32, 0, "01 20 01 00 00 00 00 00 00 00 ");
  // An index outside of the tensor, by a short gap, a long one, and one that never ends.
  ExpectRefused(Coding::kRice, 30, 4, "04 02 91 f0 8f 80 00 ");
  ExpectRefused(Coding::kRice, 64, 0, "01 00 00 00 00 00 00 00 00 00 01 ");
  ExpectRefused(Coding::kRice, 64, 0, "01 00 00 00 00 00 00 00 00 00 00 ");
  // Unused bits of the codes, of the gaps.
  ExpectRefused(Coding::kRice, 32, 1, "04 02 1a 8f 80 00 ");
  ExpectRefused(Coding::kRice, 32, 4, "03 02 91 10 8f 00 ");
  ExpectRefused(Coding::kRice, 32, 0, "04 02 8f 80 04 ");
  // Nothing at all, and a count without an end.
  ExpectRefused(Coding::kWord, 32, 4, "");
  ExpectRefused(Coding::kRice, 32, 4, "");
  ExpectRefused(Coding::kRice, 32, 4, "ff ff ff ff ff ff ff ff ff ff ff ff ");
  // What no exchange asks for.
  ExpectRefused(Coding::kRice, 32, 9, "00 ");
  ExpectRefused(Coding::kRice, -1, 4, "00 ");
  ExpectRefused(Coding::kWord, MaxSparseExtent(4) + 1, 4, "00 ");
  ExpectRefused(static_cast<Coding>(2), 32, 4, "00 ");
}

TEST(SparseCodeTest, BlocksBeforeTheFaultAreGoodAndNoneComesAfterIt) {
  for (const Coding coding : kCodings) {
    std::vector<uint32_t> index(3000);
    std::iota(index.begin(), index.end(), 0);
    index.back() += 5;
    const Bytes bytes = Encode(coding, 3005, WithCodes(index, 4), 4);
    ByteReader in(bytes);
    SparseReader reader(coding, 3004, 4, in);
    size_t seen = 0;
    while (reader.Next()) {
      for (const uint32_t i : reader.index()) EXPECT_EQ(i, seen++);
    }
    EXPECT_EQ(seen, 2 * SparseReader::kBlock);
    EXPECT_EQ(reader.status().code(), StatusCode::kInvalidArgument);
    EXPECT_FALSE(reader.Next());
    EXPECT_TRUE(reader.index().empty());
    EXPECT_FALSE(in.ok());
  }
}

TEST(SparseCodeTest, RiceTakesAboutTheEntropyOfTheChoice) {
  for (const double density : {0.5, 0.1, 0.01, 0.001}) {
    const int64_t extent = 1'000'000;
    const std::vector<uint32_t> index = RandomIndex(extent, density, 1);
    const double entropy = -static_cast<double>(extent) *
                           (density * std::log2(density) + (1 - density) * std::log2(1 - density)) /
                           8;
    const auto bytes = static_cast<double>(SparseBytes(Coding::kRice, index, 0));
    EXPECT_LT(bytes, 1.05 * entropy) << density;
  }
}

}  // namespace
}  // namespace dad
