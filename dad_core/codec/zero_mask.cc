#include "codec/zero_mask.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

// The loops below are worth vectorising at any -O level of the build.
#pragma GCC optimize("O3")

namespace dad {
namespace {

constexpr std::byte kRaw{0};
constexpr std::byte kMasked{1};
constexpr int64_t kGroup = 64;  // elements per word of the bitmap

int64_t MaskBytes(int64_t count) { return (count + 7) / 8; }

// Elements and their neighbours lie at any address.
template <typename T>
T LoadAt(const std::byte* from, int64_t i) {
  T x;
  std::memcpy(&x, from + i * static_cast<int64_t>(sizeof x), sizeof x);
  return x;
}
template <typename T>
void StoreAt(std::byte* to, int64_t i, T x) {
  std::memcpy(to + i * static_cast<int64_t>(sizeof x), &x, sizeof x);
}

template <typename T>
int64_t CountNonZero(const std::byte* from, int64_t count) {
  int64_t total = 0;
  // Short sums in the element's own type: vectors need no widening.
  constexpr int64_t kChunk = 4096;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t n = std::min(kChunk, count - begin);
    const std::byte* chunk = from + begin * static_cast<int64_t>(sizeof(T));
    T sum = 0;
    for (int64_t i = 0; i < n; ++i) sum = static_cast<T>(sum + (LoadAt<T>(chunk, i) != 0 ? 1 : 0));
    total += static_cast<int64_t>(sum);
  }
  return total;
}

// Bits of at most 64 elements.
template <typename T>
uint64_t MaskOf(const std::byte* from, int64_t n) {
  uint64_t mask = 0;
  for (int64_t i = 0; i < n; ++i) mask |= static_cast<uint64_t>(LoadAt<T>(from, i) != 0) << i;
  return mask;
}

template <typename T>
void Pack(const std::byte* from, int64_t count, int64_t num_values, std::byte* mask_out,
          std::byte* values) {
  int64_t written = 0;
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const int64_t n = std::min(kGroup, count - begin);
    const std::byte* group = from + begin * static_cast<int64_t>(sizeof(T));
    uint64_t mask = 0;
    if (num_values - written >= kGroup && n == kGroup) {
      // Written in any case, kept if not zero: no branch to be foretold. There is room.
      for (int64_t i = 0; i < kGroup; ++i) {
        const T x = LoadAt<T>(group, i);
        StoreAt<T>(values, written, x);
        written += x != 0 ? 1 : 0;
        mask |= static_cast<uint64_t>(x != 0) << i;
      }
    } else {
      mask = MaskOf<T>(group, n);
      for (uint64_t rest = mask; rest != 0; rest &= rest - 1) {
        StoreAt<T>(values, written++, LoadAt<T>(group, std::countr_zero(rest)));
      }
    }
    std::memcpy(mask_out + begin / 8, &mask, static_cast<size_t>(MaskBytes(n)));
  }
}

uint64_t MaskAt(const std::byte* masks, int64_t begin, int64_t n) {
  uint64_t mask = 0;
  std::memcpy(&mask, masks + begin / 8, static_cast<size_t>(MaskBytes(n)));
  return mask;
}

// How many bits are set; -1 if there is one behind the last element.
int64_t CountMask(const std::byte* masks, int64_t count) {
  int64_t total = 0;
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const int64_t n = std::min(kGroup, count - begin);
    const uint64_t mask = MaskAt(masks, begin, n);
    if (n < kGroup && (mask >> n) != 0) return -1;
    total += std::popcount(mask);
  }
  return total;
}

template <typename T>
void Unpack(const std::byte* masks, const std::byte* values, int64_t num_values, int64_t count,
            std::byte* to) {
  int64_t taken = 0;
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const int64_t n = std::min(kGroup, count - begin);
    uint64_t mask = MaskAt(masks, begin, n);
    std::byte* group = to + begin * static_cast<int64_t>(sizeof(T));
    if (num_values - taken >= kGroup && n == kGroup) {
      for (int64_t i = 0; i < kGroup; ++i, mask >>= 1) {
        const auto bit = static_cast<int64_t>(mask & 1);
        StoreAt<T>(group, i, static_cast<T>(LoadAt<T>(values, taken) & static_cast<T>(-bit)));
        taken += bit;
      }
    } else {
      std::memset(group, 0, static_cast<size_t>(n) * sizeof(T));
      for (; mask != 0; mask &= mask - 1) {
        StoreAt<T>(group, std::countr_zero(mask), LoadAt<T>(values, taken++));
      }
    }
  }
}

// Calls with a value of the unsigned type that is as wide as an element.
template <typename Call>
auto WithWidth(DType dtype, const Call& call) {
  switch (SizeOf(dtype)) {
    case 2: return call(uint16_t{});
    case 4: return call(uint32_t{});
    default: return call(uint64_t{});
  }
}

}  // namespace

size_t PackedBytes(const void* data, int64_t count, DType dtype) {
  const auto* from = static_cast<const std::byte*>(data);
  return WithWidth(dtype, [&]<typename T>(T) {
    const size_t raw = 1 + static_cast<size_t>(count) * sizeof(T);
    const auto values = static_cast<size_t>(CountNonZero<T>(from, count));
    const size_t masked = 1 + static_cast<size_t>(MaskBytes(count)) + values * sizeof(T);
    return std::min(raw, masked);
  });
}

void PackZeros(const void* data, int64_t count, DType dtype, std::span<std::byte> out) {
  const auto* from = static_cast<const std::byte*>(data);
  const size_t raw_bytes = static_cast<size_t>(count) * SizeOf(dtype);
  if (out.size() == 1 + raw_bytes) {
    out[0] = kRaw;
    if (raw_bytes > 0) std::memcpy(out.data() + 1, from, raw_bytes);
    return;
  }
  out[0] = kMasked;
  const auto mask_bytes = static_cast<size_t>(MaskBytes(count));
  const auto values = static_cast<int64_t>((out.size() - 1 - mask_bytes) / SizeOf(dtype));
  WithWidth(dtype, [&]<typename T>(T) {
    Pack<T>(from, count, values, out.data() + 1, out.data() + 1 + mask_bytes);
  });
}

Status UnpackZeros(std::span<const std::byte> bytes, int64_t count, DType dtype, void* data) {
  const size_t width = SizeOf(dtype);
  const size_t raw_bytes = static_cast<size_t>(count) * width;
  const auto mask_bytes = static_cast<size_t>(MaskBytes(count));
  if (!bytes.empty() && bytes[0] == kRaw && bytes.size() == 1 + raw_bytes) {
    if (raw_bytes > 0) std::memcpy(data, bytes.data() + 1, raw_bytes);
    return Status::Ok();
  }
  const bool masked = !bytes.empty() && bytes[0] == kMasked && bytes.size() >= 1 + mask_bytes;
  if (masked) {
    const std::byte* masks = bytes.data() + 1;
    const size_t value_bytes = bytes.size() - 1 - mask_bytes;
    const int64_t values = CountMask(masks, count);
    if (values >= 0 && static_cast<size_t>(values) * width == value_bytes) {
      WithWidth(dtype, [&]<typename T>(T) {
        Unpack<T>(masks, masks + mask_bytes, values, count, static_cast<std::byte*>(data));
      });
      return Status::Ok();
    }
  }
  return Status::InvalidArgument("zero mask: " + std::to_string(bytes.size()) +
                                 " bytes are no packing of " + std::to_string(count) + " elements");
}

}  // namespace dad
