// codec/float_pack.h: choices of type and count, then a packing.
#include "codec/float_pack.h"

#include <cstring>

#include "fuzz.h"

namespace dad::fuzz {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16};

Bytes PackingOf(const Bytes& values, int64_t count, DType dtype) {
  Bytes packed(PackFloatsRoom(count, dtype));
  const size_t size = PackFloats(values.data(), count, dtype, packed);
  Require(size <= 1 + values.size(), "a packing that is longer than what it packs");
  packed.resize(size);
  return packed;
}

void Run(ByteSpan input) {
  Input choices(input);
  const DType dtype = choices.OneOf(kTypes);
  const auto count = static_cast<int64_t>(choices.Short());
  const Bytes bytes(choices.Rest().begin(), choices.Rest().end());  // memory of their own
  Bytes values(static_cast<size_t>(count) * SizeOf(dtype));
  // What is no packing are values all the same.
  if (!UnpackFloats(bytes, count, dtype, values.data()).ok()) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = bytes.empty() ? std::byte{0} : bytes[i % bytes.size()];
    }
  }
  Bytes again(values.size(), std::byte{0xee});
  Require(UnpackFloats(PackingOf(values, count, dtype), count, dtype, again.data()),
          "our own packing is refused");
  Require(again == values, "no round trip");
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (size_t type = 0; type < std::size(kTypes); ++type) {
    const size_t width = SizeOf(kTypes[type]);
    for (const size_t count : {0, 1, 63, 64, 130}) {
      for (const size_t period : {1, 3}) {
        Bytes values(count * width);
        for (size_t i = 0; i < count; i += period) {
          // Exponents around one, and now and then another.
          const auto high = static_cast<uint16_t>((i % 17 == 5 ? 0x2000 : 0x3f00) + i * 37);
          std::memcpy(values.data() + (i + 1) * width - 2, &high, sizeof high);
        }
        const Bytes packed = PackingOf(values, static_cast<int64_t>(count), kTypes[type]);
        seeds.push_back(Seed().Byte(type).Short(count).Rest(packed).bytes());
      }
    }
  }
  return seeds;
}

const Register registered({"float_pack", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
