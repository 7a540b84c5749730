// codec/zero_mask.h: choices of type and count, then a packing.
#include "codec/zero_mask.h"

#include <algorithm>

#include "fuzz.h"

namespace dad::fuzz {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

void Run(ByteSpan input) {
  Input choices(input);
  const DType dtype = choices.OneOf(kTypes);
  const auto count = static_cast<int64_t>(choices.Short());
  const ByteSpan bytes = choices.Rest();
  Bytes values(static_cast<size_t>(count) * SizeOf(dtype));
  if (!UnpackZeros(bytes, count, dtype, values.data()).ok()) return;
  // Ours is never longer than what we got, and comes back bit for bit.
  Bytes packed(PackedBytes(values.data(), count, dtype));
  Require(packed.size() <= bytes.size(), "a packing that is not the shortest");
  PackZeros(values.data(), count, dtype, packed);
  Bytes again(values.size(), std::byte{0xee});
  Require(UnpackZeros(packed, count, dtype, again.data()).ok(), "our own packing is refused");
  Require(again == values, "no round trip");
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (size_t type = 0; type < 4; ++type) {
    for (const size_t count : {0, 1, 8, 63, 130}) {
      for (const size_t period : {1, 3}) {
        Bytes values(count * SizeOf(kTypes[type]));
        for (size_t i = 0; i < count; i += period) {
          values[i * SizeOf(kTypes[type])] = static_cast<std::byte>(i + 1);
        }
        const auto n = static_cast<int64_t>(count);
        Bytes packed(PackedBytes(values.data(), n, kTypes[type]));
        PackZeros(values.data(), n, kTypes[type], packed);
        seeds.push_back(Seed().Byte(type).Short(count).Rest(packed).bytes());
      }
    }
  }
  return seeds;
}

const Register registered({"zero_mask", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
