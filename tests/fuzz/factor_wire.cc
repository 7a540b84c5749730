// codec/factor_wire.h: choices of wire, type and size, then the bytes of the matrix.
#include "codec/factor_wire.h"

#include <cmath>
#include <cstring>

#include "fuzz.h"

namespace dad::fuzz {
namespace {

template <typename T>
constexpr DType kDType = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;

template <typename T>
void Check(Wire wire, int64_t k, int64_t n, ByteSpan bytes) {
  const auto count = static_cast<size_t>(k * n);
  std::vector<T> values(count), again(count), told(count);
  const Status status = DecodeFactors<T>(wire, bytes, ViewOf(values.data(), k, n));
  const size_t size = EncodedBytes(wire, k, n, kDType<T>);
  Require(!status.ok() || bytes.size() == size, "a decoder took another size");
  if (!status.ok()) return;
  // What we make of it is decoded, and as the sender was told.
  Bytes encoded(size);
  EncodeFactors<T>(wire, ViewOf<const T>(values.data(), k, n), encoded, ViewOf(told.data(), k, n));
  Require(DecodeFactors<T>(wire, encoded, ViewOf(again.data(), k, n)).ok(),
          "our own encoding is refused");
  Require(count == 0 || std::memcmp(again.data(), told.data(), count * sizeof(T)) == 0,
          "the sender was told something else");
  if (wire == Wire::kFp32 && count > 0) {
    Require(std::memcmp(again.data(), values.data(), count * sizeof(T)) == 0, "not exact");
  }
}

void Run(ByteSpan input) {
  Input choices(input);
  const auto wire = static_cast<Wire>(choices.Below(kNumWires));
  const bool is_double = choices.Below(2) != 0;
  const auto k = static_cast<int64_t>(choices.Below(6));
  const auto n = static_cast<int64_t>(choices.Short() % 5000);
  if (is_double) {
    Check<double>(wire, k, n, choices.Rest());
  } else {
    Check<float>(wire, k, n, choices.Rest());
  }
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (size_t wire = 0; wire < static_cast<size_t>(kNumWires); ++wire) {
    for (const size_t n : {1, 7, 40}) {
      for (const bool is_double : {false, true}) {
        std::vector<float> x(2 * n);
        for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
        const std::vector<double> y(x.begin(), x.end());
        const auto cols = static_cast<int64_t>(n);
        Bytes bytes(EncodedBytes(static_cast<Wire>(wire), 2, cols,
                                 is_double ? DType::kFloat64 : DType::kFloat32));
        if (is_double) {
          EncodeFactors<double>(static_cast<Wire>(wire), ViewOf(y.data(), 2, cols), bytes);
        } else {
          EncodeFactors<float>(static_cast<Wire>(wire), ViewOf(std::as_const(x).data(), 2, cols),
                               bytes);
        }
        seeds.push_back(
            Seed().Byte(wire).Byte(is_double ? 1 : 0).Byte(2).Short(n).Rest(bytes).bytes());
      }
    }
  }
  return seeds;
}

const Register registered({"factor_wire", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
