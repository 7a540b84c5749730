// The vectors of FIPS 180-4 and RFC 4231, and one of Python's hashlib.
#include "util/sha256.h"

#include <gtest/gtest.h>

namespace dad {
namespace {

std::string Repeated(const std::string& text, size_t count) {
  std::string repeated;
  for (size_t i = 0; i < count; ++i) repeated += text;
  return repeated;
}

TEST(Sha256Test, VectorsOfNist) {
  EXPECT_EQ(HexOf(Sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(HexOf(Sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(HexOf(Sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(HexOf(Sha256(Repeated("a", 1'000'000))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Each length has a padding of its own. A digest over the digests of all lengths stands for them:
// hashlib.sha256(b"".join(hashlib.sha256(b"x" * n).digest() for n in range(300))).hexdigest()
TEST(Sha256Test, EveryLengthAroundABlock) {
  std::string digests;
  for (size_t length = 0; length < 300; ++length) digests += Sha256(std::string(length, 'x'));
  EXPECT_EQ(HexOf(Sha256(digests)),
            "3068c8c08e804c2be19cb16d8f13fb8cbdff841c789d00ce28ded624674b6d55");
}

TEST(HmacSha256Test, VectorsOfRfc4231) {
  EXPECT_EQ(HexOf(HmacSha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(HexOf(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(HexOf(HmacSha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(HexOf(HmacSha256(std::string(131, '\xaa'),
                             "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(SameBytesTest, ComparesContentAndLength) {
  EXPECT_TRUE(SameBytes("", ""));
  EXPECT_TRUE(SameBytes("abc", "abc"));
  EXPECT_FALSE(SameBytes("abc", "abd"));
  EXPECT_FALSE(SameBytes("abc", "ab"));
}

TEST(RandomBytesTest, AreFresh) {
  EXPECT_EQ(RandomBytes(0), "");
  EXPECT_EQ(RandomBytes(100).size(), 100u);
  EXPECT_NE(RandomBytes(32), RandomBytes(32));
}

}  // namespace
}  // namespace dad
