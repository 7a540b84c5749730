// codec/sparse_code.h: choices, then an encoding and what may follow it.
#include "codec/sparse_code.h"

#include <random>

#include "fuzz.h"

namespace dad::fuzz {
namespace {

constexpr Coding kCodings[] = {Coding::kWord, Coding::kRice};
constexpr int kWidths[] = {4, 1, 0};
constexpr int64_t kExtents[] = {100, 5000, 1 << 20,          1 << 28,
                                0,   1,    int64_t{1} << 31, int64_t{1} << 32};

struct Elements {
  std::vector<uint32_t> index;
  std::vector<uint8_t> code;
  bool operator==(const Elements&) const = default;
};

void Run(ByteSpan input) {
  Input choices(input);
  const Coding coding = choices.OneOf(kCodings);
  const int value_bits = choices.OneOf(kWidths);
  const int64_t extent = choices.OneOf(kExtents);
  const ByteSpan bytes = choices.Rest();

  Elements decoded;
  ByteReader in(bytes);
  const Status status = DecodeSparse(coding, extent, value_bits, in, decoded.index, decoded.code);
  Require(status.ok() == in.ok(), "the reader and the status disagree");
  Require(LargestAllocation() <= 4096 + 32 * bytes.size(), "vectors larger than the bytes justify");

  // In blocks the same comes out, up to the fault if there is one.
  Elements in_blocks;
  ByteReader again(bytes);
  SparseReader reader(coding, extent, value_bits, again);
  while (reader.Next()) {
    Require(!reader.index().empty(), "an empty block");
    in_blocks.index.insert(in_blocks.index.end(), reader.index().begin(), reader.index().end());
    in_blocks.code.insert(in_blocks.code.end(), reader.code().begin(), reader.code().end());
  }
  Require(reader.status().ok() == status.ok() && again.left() == in.left(),
          "blocks and vectors disagree");
  for (size_t i = 0; i < in_blocks.index.size(); ++i) {
    Require(in_blocks.index[i] < extent, "an index outside");
    Require(i == 0 || in_blocks.index[i] > in_blocks.index[i - 1], "indices that do not rise");
  }
  if (!status.ok()) return;
  Require(in_blocks == decoded, "blocks and vectors differ");

  // Our own encoding of it is never longer, has the size we say, and decodes to the same.
  Bytes encoded;
  EncodeSparse(coding, extent, decoded.index, decoded.code, value_bits, encoded);
  Require(encoded.size() <= bytes.size() - in.left(), "an encoding that is not the shortest");
  Require(static_cast<int64_t>(encoded.size()) == SparseBytes(coding, decoded.index, value_bits),
          "SparseBytes is not the size");
  Elements back;
  ByteReader whole(encoded);
  Require(DecodeSparse(coding, extent, value_bits, whole, back.index, back.code).ok() &&
              whole.AtEnd() && back == decoded,
          "no round trip");
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  std::mt19937 random(1);
  for (size_t coding = 0; coding < 2; ++coding) {
    for (size_t width = 0; width < 3; ++width) {
      for (size_t extent = 0; extent < 4; ++extent) {
        Elements elements;
        const auto step = static_cast<uint32_t>(kExtents[extent] / 40);
        for (uint64_t i = random() % step; i < static_cast<uint64_t>(kExtents[extent]);
             i += 1 + random() % (2 * step)) {
          elements.index.push_back(static_cast<uint32_t>(i));
          const auto code = static_cast<uint8_t>(random() & ((1u << kWidths[width]) - 1));
          if (kWidths[width] > 0) elements.code.push_back(code);
        }
        Bytes bytes;
        EncodeSparse(kCodings[coding], kExtents[extent], elements.index, elements.code,
                     kWidths[width], bytes);
        seeds.push_back(Seed().Byte(coding).Byte(width).Byte(extent).Rest(bytes).bytes());
      }
    }
  }
  return seeds;
}

const Register registered({"sparse_code", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
