// codec/qsgd.h: choices of type, bits and count, then the bytes.
#include "codec/qsgd.h"

#include <cmath>

#include "fuzz.h"

namespace dad::fuzz {
namespace {

constexpr int kBits[] = {1, 2, 4, 8, 3};

template <typename T>
void Check(int64_t count, int bits, ByteSpan bytes) {
  std::vector<T> sum(static_cast<size_t>(count), T(0));
  if (!AddQsgd<T>(bytes, count, bits, sum.data()).ok()) return;
  Require(bytes.size() == QsgdBytes(count, bits), "a decoder took another size");
  // Sums of finite values are encoded again, and that is decoded.
  Bytes encoded(bytes.size());
  if (!EncodeQsgd<T>(sum.data(), count, T(1), bits, 7, encoded)) return;
  std::vector<T> again(sum.size(), T(0));
  Require(AddQsgd<T>(encoded, count, bits, again.data()).ok(), "our own encoding is refused");
}

void Run(ByteSpan input) {
  Input choices(input);
  const bool is_double = choices.Below(2) != 0;
  const int bits = choices.OneOf(kBits);
  const auto count = static_cast<int64_t>(choices.Short());
  if (is_double) {
    Check<double>(count, bits, choices.Rest());
  } else {
    Check<float>(count, bits, choices.Rest());
  }
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (size_t bits = 0; bits < 4; ++bits) {
    for (const size_t count : {0, 1, 9, 700}) {
      std::vector<float> x(count);
      for (size_t i = 0; i < count; ++i) x[i] = std::cos(static_cast<float>(3 * i));
      const auto n = static_cast<int64_t>(count);
      Bytes bytes(QsgdBytes(n, kBits[bits]));
      Require(EncodeQsgd<float>(x.data(), n, 1.0f, kBits[bits], 1, bytes), "not finite");
      seeds.push_back(Seed().Byte(count % 2).Byte(bits).Short(count).Rest(bytes).bytes());
    }
  }
  return seeds;
}

const Register registered({"qsgd", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
