#include "dad/digest.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace dad {
namespace {

uint64_t Of(std::string_view text) { return Digest(text.data(), text.size()); }

// The published values of XXH64.
TEST(DigestTest, HasThePublishedValues) {
  EXPECT_EQ(Of(""), 0xef46db3751d8e999ull);
  EXPECT_EQ(Of("a"), 0xd24ec4f1a98c6e5bull);
  EXPECT_EQ(Of("abc"), 0x44bc2cf5ad770999ull);
  EXPECT_EQ(Of("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1ull);
}

TEST(DigestTest, EveryBitOfEveryLengthCounts) {
  for (size_t size = 1; size < 80; ++size) {
    std::string text(size, 'x');
    const uint64_t before = Of(text);
    for (size_t i = 0; i < size; ++i) {
      text[i] ^= 1;
      EXPECT_NE(Of(text), before) << "byte " << i << " of " << size;
      text[i] ^= 1;
    }
  }
}

}  // namespace
}  // namespace dad
