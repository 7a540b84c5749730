// Rice coding as the kernels do it, emulated on the host, against the CPU's encoder bit for bit.
#include "codec/cuda/rice_kernels.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "codec/sparse_code.h"
#include "emulate.h"
#include "util/byte_io.h"

namespace dad::cuda {
namespace {

std::vector<std::byte> EncodeByKernels(const std::vector<uint32_t>& index,
                                       const std::vector<uint8_t>& code, int value_bits) {
  const auto count = static_cast<int64_t>(index.size());
  const int64_t capacity = count + 700;  // more than there is, as on the device
  const int64_t blocks = DivideUp(capacity, kTile);
  std::vector<Counter> bits(kRiceParameters, 0);
  Emulate<RiceCostKernel>({index.data(), &count, capacity, bits.data()});
  int k = -1;
  int64_t total = -1;
  Emulate<RiceChooseKernel>({bits.data(), &k, &total});
  std::vector<int64_t> block_bits(static_cast<size_t>(blocks), -1), offset(block_bits);
  Emulate<RiceBlockBitsKernel>({index.data(), &count, capacity, &k, block_bits.data()}, 2);
  Emulate<RiceOffsetsKernel>({block_bits.data(), blocks, offset.data()}, 3);
  std::vector<uint32_t> stream(static_cast<size_t>(DivideUp(total, 32)) + 1, 0);
  Emulate<RiceWriteKernel>({index.data(), &count, capacity, &k, offset.data(), stream.data()}, 4);

  ByteWriter out;
  out.Varint(static_cast<uint64_t>(count));
  if (count == 0) return out.bytes();
  out.Value(static_cast<uint8_t>(k));
  if (value_bits > 0) {
    std::vector<uint32_t> codes(static_cast<size_t>(DivideUp(count * value_bits, 32)) + 1, 0);
    Emulate<PackCodesKernel>({code.data(), &count, capacity, value_bits, codes.data()}, 5);
    const auto* bytes = reinterpret_cast<const uint8_t*>(codes.data());
    for (int64_t i = 0; i < DivideUp(count * value_bits, 8); ++i) out.Value(bytes[i]);
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(stream.data());
  for (int64_t i = 0; i < DivideUp(total, 8); ++i) out.Value(bytes[i]);
  return out.bytes();
}

TEST(RiceKernelsTest, SameBytesAsTheHostsEncoder) {
  std::mt19937 random(7);
  for (const int64_t count : {0, 1, 2, 3, 255, 256, 257, 1023, 1024, 1025, 5000}) {
    for (const uint32_t step : {1u, 2u, 40u, 3000u, 50'000u}) {
      for (const int value_bits : {0, 1, 4}) {
        std::vector<uint32_t> index;
        std::vector<uint8_t> code;
        uint32_t at = random() % step;
        for (int64_t i = 0; i < count; ++i) {
          index.push_back(at);
          code.push_back(static_cast<uint8_t>(random() % (1u << value_bits)));
          at += 1 + random() % step;
        }
        if (value_bits == 0) code.clear();
        std::vector<std::byte> expected;
        EncodeSparse(Coding::kRice, int64_t{at} + 1, index, code, value_bits, expected);
        EXPECT_EQ(EncodeByKernels(index, code, value_bits), expected)
            << count << " elements, steps to " << step << ", " << value_bits << " bits";
      }
    }
  }
}

TEST(RiceKernelsTest, GapsOfAllWidths) {
  const std::vector<uint32_t> index{0, 1, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};
  std::vector<std::byte> expected;
  EncodeSparse(Coding::kRice, int64_t{1} << 32, index, {}, 0, expected);
  EXPECT_EQ(EncodeByKernels(index, {}, 0), expected);
}

}  // namespace
}  // namespace dad::cuda
