// exchange/share/share_io.h: choices of type and count, then blocks as they follow each other in a
// share.
#include <cmath>

#include "exchange/share/share_io.h"
#include "fuzz.h"

namespace dad::fuzz {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

template <typename T>
void Check(int64_t count, ByteSpan bytes) {
  ByteReader in(bytes);
  while (in.ok() && !in.AtEnd()) {
    const BlockView block = ReadBlock(in, count);
    if (!in.ok()) return;
    // As the exchanges do it: the size was checked by ReadBlock.
    std::vector<T> values(static_cast<size_t>(count));
    if (!DecodeBlock(block, count, values.data()).ok()) return;

    TensorView view{.dtype = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32, .shape = {count}};
    view.data = values.data();
    for (const bool pack : {false, true}) {
      ShareWriter writer(pack);
      writer.Block(view);
      GatherBuffer gathered;
      writer.AppendTo(gathered);
      Bytes share;
      for (const ByteSpan piece : gathered.Pieces()) {
        share.insert(share.end(), piece.begin(), piece.end());
      }
      ByteReader back(share);
      const BlockView again = ReadBlock(back, count);
      std::vector<T> decoded(values.size());
      Require(back.AtEnd() && DecodeBlock(again, count, decoded.data()).ok(),
              "our own block is refused");
      Require(values.empty() ||
                  std::memcmp(decoded.data(), values.data(), values.size() * sizeof(T)) == 0,
              "no round trip");
    }
  }
}

void Run(ByteSpan input) {
  Input choices(input);
  const bool is_double = choices.Below(2) != 0;
  // Counts of any size: what the bytes cannot hold must be refused before memory is asked for.
  const auto count = static_cast<int64_t>(choices.Short() << choices.Below(40));
  if (is_double) {
    Check<double>(count, choices.Rest());
  } else {
    Check<float>(count, choices.Rest());
  }
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (const DType dtype : kTypes) {
    for (const size_t count : {0, 5, 100, 300}) {
      for (const size_t period : {1, 4}) {
        Bytes values(count * SizeOf(dtype));
        for (size_t i = 0; i < count; i += period) {
          values[i * SizeOf(dtype)] = static_cast<std::byte>(i + 1);
        }
        TensorView view{.dtype = dtype, .shape = {static_cast<int64_t>(count)}};
        view.data = values.data();
        ShareWriter writer(count == 300);
        writer.Block(view);
        writer.Block(view);
        GatherBuffer gathered;
        writer.AppendTo(gathered);
        Seed seed;
        seed.Byte(count % 2).Short(count).Byte(0);
        for (const ByteSpan piece : gathered.Pieces()) seed.Rest(piece);
        seeds.push_back(seed.bytes());
      }
    }
  }
  return seeds;
}

const Register registered({"share_block", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
