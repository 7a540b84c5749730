// codec/int_quantise.h: choices of type, count and bucket, then the bytes.
#include "codec/int_quantise.h"

#include <cmath>
#include <cstring>

#include "fuzz.h"

namespace dad::fuzz {
namespace {

template <typename T>
void Check(int64_t count, int64_t bucket, ByteSpan bytes) {
  const auto size = static_cast<size_t>(count);
  std::vector<T> values(size), sum(size, T(1)), told(size), again(size);
  const Status status = DequantiseInt8<T>(bytes, count, bucket, values.data());
  const Status added = AddDequantisedInt8<T>(bytes, count, bucket, sum.data());
  Require(status.ok() == added.ok(), "decoding and adding disagree");
  for (size_t i = 0; i < size && !added.ok(); ++i) {
    Require(sum[i] == T(1), "an error changed the sum");
  }
  if (!status.ok()) return;
  Require(bytes.size() == QuantisedBytes(count, bucket), "a decoder took another size");
  Bytes encoded(bytes.size());
  QuantiseInt8<T>(values.data(), count, bucket, encoded, told.data());
  Require(DequantiseInt8<T>(encoded, count, bucket, again.data()).ok(),
          "our own encoding is refused");
  Require(size == 0 || std::memcmp(again.data(), told.data(), size * sizeof(T)) == 0,
          "the sender was told something else");
}

void Run(ByteSpan input) {
  Input choices(input);
  const bool is_double = choices.Below(2) != 0;
  const auto count = static_cast<int64_t>(choices.Short());
  const auto bucket = static_cast<int64_t>(choices.Short()) + 1;
  if (is_double) {
    Check<double>(count, bucket, choices.Rest());
  } else {
    Check<float>(count, bucket, choices.Rest());
  }
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (const size_t count : {0, 1, 9, 64, 300}) {
    for (const size_t bucket : {1, 8, 512}) {
      std::vector<float> x(count);
      for (size_t i = 0; i < count; ++i) x[i] = std::cos(static_cast<float>(3 * i));
      const auto n = static_cast<int64_t>(count), width = static_cast<int64_t>(bucket);
      Bytes bytes(QuantisedBytes(n, width));
      QuantiseInt8<float>(x.data(), n, width, bytes);
      seeds.push_back(Seed().Byte(count % 2).Short(count).Short(bucket - 1).Rest(bytes).bytes());
    }
  }
  return seeds;
}

const Register registered({"int_quantise", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
