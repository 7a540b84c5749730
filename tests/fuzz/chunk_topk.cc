// codec/chunk_topk.h: choices of type, bits, chunk and count, then an encoding and what may follow.
#include "codec/chunk_topk.h"

#include <cmath>

#include "codec/chunk_pick.h"
#include "fuzz.h"

namespace dad::fuzz {
namespace {

constexpr int kBits[] = {2, 1, 3, 4, 8};
constexpr int64_t kChunks[] = {16, 1, 7, 256, 4096};

template <typename T>
Bytes Encode(const ChunkCode& code, std::vector<T>& values) {
  ChunkPicker<T> picker(CpuLevel::kBaseline);
  std::vector<uint32_t> index;
  const auto count = static_cast<int64_t>(values.size());
  if (count == 0) return {};  // there is no run
  for (int64_t at = 0; at < count; at += code.chunk) {
    T* const chunk = values.data() + at;
    const int64_t n = std::min(code.chunk, count - at);
    Require(picker.Pick({chunk, T(1), nullptr, T(1), chunk, n}, code.k, static_cast<uint32_t>(at),
                        index),
            "a finite value is none");
  }
  std::vector<T> picked;
  for (const uint32_t i : index) picked.push_back(values[i]);
  Bytes bytes;
  EncodeChunkRun<T>(code, index, picked, bytes);
  for (size_t i = 0; i < index.size(); ++i) values[index[i]] = picked[i];
  return bytes;
}

template <typename T>
void Check(const ChunkCode& code, int64_t count, ByteSpan bytes) {
  std::vector<T> sum(static_cast<size_t>(count), T(0));
  std::vector<uint32_t> most(static_cast<size_t>(code.num_chunks(count)), 0);
  ByteReader in(bytes);
  const auto added = AddChunks<T>(code, count, in, sum.data(), &most);
  if (!added.ok()) return;
  int64_t total = 0;
  for (const uint32_t n : most) total += n;
  Require(total == added.value(), "the counts of chunks are not those of the elements");
  for (const T x : sum) Require(std::isfinite(x), "a decoded value is not finite");
  // What was decoded is encoded again; that decodes to it but for what is left.
  std::vector<T> left = sum;
  const Bytes encoded = Encode(code, left);
  std::vector<T> again(sum.size(), T(0));
  ByteReader back(encoded);
  Require(AddChunks<T>(code, count, back, again.data()).status(), "our own encoding is refused");
  Require(back.AtEnd(), "our own encoding has bytes left over");
  for (size_t i = 0; i < sum.size(); ++i) {
    Require(again[i] == T(0) ? left[i] == sum[i] : left[i] == sum[i] - again[i],
            "what is left is not the rest");
  }
}

void Run(ByteSpan input) {
  Input choices(input);
  const bool is_double = choices.Below(2) != 0;
  ChunkCode code;
  code.bits = choices.OneOf(kBits);
  code.chunk = choices.OneOf(kChunks);
  code.k = std::min<int64_t>(code.chunk, 1 + static_cast<int64_t>(choices.Below(64)));
  const auto count = static_cast<int64_t>(choices.Short());
  if (is_double) {
    Check<double>(code, count, choices.Rest());
  } else {
    Check<float>(code, count, choices.Rest());
  }
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (size_t bits = 0; bits < 5; ++bits) {
    for (size_t chunk = 0; chunk < 5; ++chunk) {
      for (const size_t count : {0, 1, 300, 5000}) {
        if (count == 5000 && kChunks[chunk] < 256) continue;
        ChunkCode code{.chunk = kChunks[chunk], .k = std::min<int64_t>(8, kChunks[chunk])};
        code.bits = kBits[bits];
        std::vector<float> x(count);
        for (size_t i = 0; i < count; ++i) x[i] = std::cos(static_cast<float>(3 * i));
        const Bytes bytes = Encode(code, x);
        seeds.push_back(
            Seed().Byte(count % 2).Byte(bits).Byte(chunk).Byte(7).Short(count).Rest(bytes).bytes());
      }
    }
  }
  return seeds;
}

const Register registered({"chunk_topk", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
