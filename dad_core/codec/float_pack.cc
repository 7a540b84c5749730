#include "codec/float_pack.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

// The loops below are worth vectorising at any -O level of the build.
#pragma GCC optimize("O3")

namespace dad {
namespace {

constexpr uint8_t kRawForm = 0;
constexpr uint8_t kBlockForm = 1;

constexpr int kBlock = 64;
constexpr uint8_t kZeroBlock = 0;
constexpr uint8_t kMaskedBlock = 1;
constexpr int kLeastTop = 2;
constexpr int kMostTop = 254;
constexpr uint8_t kRawBlock = 255;

constexpr int kFar = 3;  // the code of an exponent that is not one of the three
// Of far exponents: v is at most 506 and takes 17 bits.
constexpr int kMostZeros = 8;

// A block is written and read at full width, whatever there is of it: up to this many bytes, with a
// margin for words.
constexpr size_t kBlockRoom = 512;

// Elements lie at any address.
template <typename T>
struct [[gnu::packed, gnu::may_alias]] Unaligned {
  T value;
};
template <typename T>
T LoadAt(const std::byte* from, int64_t i) {
  return reinterpret_cast<const Unaligned<T>*>(from)[i].value;
}
template <typename T>
void StoreAt(std::byte* to, int64_t i, T x) {
  reinterpret_cast<Unaligned<T>*>(to)[i].value = x;
}

// T is uint32_t for float32, uint16_t for bfloat16, which is the upper half of it.
template <typename T>
constexpr int kShift = sizeof(T) == 4 ? 16 : 0;

struct Bytes {
  uint8_t at[kBlock];
};

// The lowest bit of each byte, side by side. The products of different bytes do not meet.
uint64_t BitsOf(const Bytes& bytes) {
  uint64_t bits = 0;
  for (int i = 0; i < kBlock / 8; ++i) {
    uint64_t eight;
    std::memcpy(&eight, bytes.at + 8 * i, sizeof eight);
    bits |= ((eight & 0x0101010101010101u) * 0x0102040810204080u >> 56) << (8 * i);
  }
  return bits;
}

// Eight bits as the lowest of eight bytes.
struct SpreadTable {
  uint64_t bytes[256];
};
constexpr SpreadTable MakeSpreadTable() {
  SpreadTable table{};
  for (uint64_t bits = 0; bits < 256; ++bits) {
    for (int i = 0; i < 8; ++i) table.bytes[bits] |= (bits >> i & 1) << (8 * i);
  }
  return table;
}
constexpr SpreadTable kSpread = MakeSpreadTable();

// A far exponent as bits, by where it is: [e - c + kFarFromTop].
struct FarCode {
  uint32_t bits;
  int length;
};
constexpr int kFarFromTop = 254;
constexpr std::array<FarCode, 2 * 255> MakeFarCodes() {
  std::array<FarCode, 2 * 255> codes{};
  for (int above = -kFarFromTop; above < 255; ++above) {
    if (above <= 0 && above > -kFar) continue;
    const int v = 1 + (above > 0 ? 2 * (above - 1) + 1 : 2 * (-above - kFar));
    const int zeros = std::bit_width(static_cast<unsigned>(v)) - 1;
    const unsigned below = static_cast<unsigned>(v) - (1u << zeros);
    codes[static_cast<size_t>(above + kFarFromTop)] = {1u << zeros | below << (zeros + 1),
                                                       2 * zeros + 1};
  }
  return codes;
}
constexpr std::array<FarCode, 2 * 255> kFarCodes = MakeFarCodes();

constexpr size_t BitBytes(int n) { return static_cast<size_t>(n + 7) / 8; }

// The top of the three exponents that have the most of a block, about.
int TopOf(const Bytes& exponents, int n) {
  uint32_t sum = 0;
  for (int i = 0; i < kBlock; ++i) sum += exponents.at[i];  // those behind the last are 0
  const int mean =
      static_cast<int>((sum + static_cast<uint32_t>(n) / 2) / static_cast<uint32_t>(n));
  // The three around the mean, or one further up or down: what that adds against what it loses.
  const auto up = static_cast<uint8_t>(mean + 2), down = static_cast<uint8_t>(mean - 2);
  const auto high = static_cast<uint8_t>(mean + 1), low = static_cast<uint8_t>(mean - 1);
  uint8_t num_up = 0, num_high = 0, num_low = 0, num_down = 0;
  for (int i = 0; i < kBlock; ++i) {
    num_up = static_cast<uint8_t>(num_up + (exponents.at[i] == up));
    num_high = static_cast<uint8_t>(num_high + (exponents.at[i] == high));
    num_low = static_cast<uint8_t>(num_low + (exponents.at[i] == low));
    num_down = static_cast<uint8_t>(num_down + (exponents.at[i] == down));
  }
  const int gain_up = num_up - num_low, gain_down = num_down - num_high;
  int top = mean + 1;
  if (gain_up > 0 && gain_up >= gain_down) {
    ++top;
  } else if (gain_down > 0) {
    --top;
  }
  return top < kLeastTop ? kLeastTop : top > kMostTop ? kMostTop : top;
}

// n elements, with zeros behind them up to a full block. Returns the end.
template <typename T>
std::byte* PackPlain(const std::byte* from, int n, std::byte* out) {
  Bytes exponents, code, bit;
  std::byte* at = out + 1;
  if constexpr (sizeof(T) == 4) {
    for (int i = 0; i < kBlock; ++i) {
      StoreAt<uint16_t>(at, i, static_cast<uint16_t>(LoadAt<T>(from, i)));
    }
    at += 2 * n;
  }
  for (int i = 0; i < kBlock; ++i) {
    const auto high = static_cast<uint16_t>(LoadAt<T>(from, i) >> kShift<T>);
    exponents.at[i] = static_cast<uint8_t>(high >> 7);
    at[i] = static_cast<std::byte>((high & 0x7f) | (high >> 8 & 0x80));
  }
  at += n;
  const int top = TopOf(exponents, n);
  out[0] = static_cast<std::byte>(top);
  for (int i = 0; i < kBlock; ++i) {
    const auto below = static_cast<uint8_t>(top - exponents.at[i]);  // wraps: far as well
    code.at[i] = below < kFar ? below : kFar;
  }
  for (int i = 0; i < kBlock; ++i) bit.at[i] = static_cast<uint8_t>(code.at[i] >> 1);
  const uint64_t in_use = n == kBlock ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
  const uint64_t low = BitsOf(code) & in_use, high = BitsOf(bit) & in_use;
  std::memcpy(at, &low, sizeof low);
  at += BitBytes(n);
  std::memcpy(at, &high, sizeof high);
  at += BitBytes(n);
  uint64_t pending = 0;
  int num_pending = 0;
  for (uint64_t far = low & high; far != 0; far &= far - 1) {
    const int above = exponents.at[std::countr_zero(far)] - top;
    const FarCode& next = kFarCodes[static_cast<size_t>(above + kFarFromTop)];
    pending |= uint64_t{next.bits} << num_pending;
    num_pending += next.length;
    std::memcpy(at, &pending, sizeof pending);
    // Whole bytes are done with.
    at += num_pending / 8;
    pending >>= num_pending / 8 * 8;
    num_pending %= 8;
  }
  return num_pending > 0 ? at + 1 : at;
}

// As PackPlain, or as they are where that is shorter or as long.
template <typename T>
std::byte* PackElements(const std::byte* from, int n, std::byte* out) {
  const size_t raw = static_cast<size_t>(n) * sizeof(T);
  std::byte* end = PackPlain<T>(from, n, out);
  if (static_cast<size_t>(end - out) <= raw) return end;
  out[0] = static_cast<std::byte>(kRawBlock);
  std::memcpy(out + 1, from, raw);
  return out + 1 + raw;
}

template <typename T>
std::byte* PackBlock(const std::byte* from, int n, std::byte* out) {
  Bytes set;
  for (int i = 0; i < kBlock; ++i) set.at[i] = LoadAt<T>(from, i) != 0 ? 1 : 0;
  const uint64_t in_use = n == kBlock ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
  const uint64_t mask = BitsOf(set) & in_use;
  const int count = std::popcount(mask);
  if (count == 0) {
    out[0] = static_cast<std::byte>(kZeroBlock);
    return out + 1;
  }
  // A mask takes 72 bits, a zero among others as many as a value, and 13 for being far away.
  if (n - count <= 1) return PackElements<T>(from, n, out);
  T values[kBlock];
  int at = 0;
  for (int i = 0; i < kBlock; ++i) {
    values[at] = LoadAt<T>(from, i);
    at += static_cast<int>(mask >> i & 1);
  }
  for (int i = count; i < kBlock; ++i) values[i] = 0;
  out[0] = static_cast<std::byte>(kMaskedBlock);
  std::memcpy(out + 1, &mask, sizeof mask);
  return PackElements<T>(reinterpret_cast<const std::byte*>(values), count, out + 1 + BitBytes(n));
}

template <typename T>
size_t PackBlocks(const std::byte* from, int64_t count, std::byte* out) {
  std::byte* at = out;
  *at++ = static_cast<std::byte>(kBlockForm);
  int64_t begin = 0;
  for (; begin + kBlock <= count; begin += kBlock) {
    at = PackBlock<T>(from + begin * static_cast<int64_t>(sizeof(T)), kBlock, at);
  }
  if (begin < count) {
    std::byte rest[kBlock * sizeof(T)] = {};
    const auto n = static_cast<size_t>(count - begin);
    std::memcpy(rest, from + begin * static_cast<int64_t>(sizeof(T)), n * sizeof(T));
    at = PackBlock<T>(rest, static_cast<int>(n), at);
  }
  return static_cast<size_t>(at - out);
}

// Where a reader is; null where what it reads is no packing.
using Place = const std::byte*;

// n elements; a full block's worth is written, and kBlockRoom can be read.
template <typename T>
Place UnpackPlain(Place at, int top, int n, T* to) {
  Place low_half = at;
  if constexpr (sizeof(T) == 4) at += 2 * n;
  Place rest = at;
  at += n;
  uint64_t low = 0, high = 0;
  std::memcpy(&low, at, BitBytes(n));
  at += BitBytes(n);
  std::memcpy(&high, at, BitBytes(n));
  at += BitBytes(n);
  if (n < kBlock && (low | high) >> n != 0) return nullptr;

  Bytes exponents;
  for (int i = 0; i < kBlock / 8; ++i) {
    const uint64_t code =
        kSpread.bytes[low >> (8 * i) & 0xff] | kSpread.bytes[high >> (8 * i) & 0xff] << 1;
    std::memcpy(exponents.at + 8 * i, &code, sizeof code);
  }
  for (int i = 0; i < kBlock; ++i) exponents.at[i] = static_cast<uint8_t>(top - exponents.at[i]);

  int bit = 0;  // of the byte at `at`
  for (uint64_t far = low & high; far != 0; far &= far - 1) {
    uint32_t bits;
    std::memcpy(&bits, at, sizeof bits);
    bits >>= bit;
    const int zeros = std::countr_zero(bits);
    if (zeros > kMostZeros) return nullptr;
    const int v = static_cast<int>(1u << zeros | (bits >> (zeros + 1) & ((1u << zeros) - 1)));
    const int exponent = (v - 1) % 2 != 0 ? top + 1 + (v - 2) / 2 : top - kFar - (v - 1) / 2;
    if (exponent < 0 || exponent > 255) return nullptr;
    exponents.at[std::countr_zero(far)] = static_cast<uint8_t>(exponent);
    bit += 2 * zeros + 1;
    at += bit / 8;
    bit %= 8;
  }
  if (bit > 0 && static_cast<uint8_t>(*at++) >> bit != 0) return nullptr;

  for (int i = 0; i < kBlock; ++i) {
    const auto sign_and_mantissa = static_cast<uint16_t>(rest[i]);
    const auto top_half = static_cast<uint16_t>((sign_and_mantissa & 0x80) << 8 |
                                                exponents.at[i] << 7 | (sign_and_mantissa & 0x7f));
    if constexpr (sizeof(T) == 4) {
      to[i] = static_cast<T>(top_half) << 16 | LoadAt<uint16_t>(low_half, i);
    } else {
      to[i] = top_half;
    }
  }
  return at;
}

template <typename T>
Place UnpackElements(Place at, int n, T* to) {
  const int top = static_cast<uint8_t>(*at++);
  if (top == kRawBlock) {
    const size_t raw = static_cast<size_t>(n) * sizeof(T);
    std::memcpy(to, at, raw);
    return at + raw;
  }
  return top < kLeastTop ? nullptr : UnpackPlain<T>(at, top, n, to);
}

// The same of a whole block.
template <typename T>
Place UnpackBlock(Place at, int n, T* to) {
  const auto first = static_cast<uint8_t>(*at);
  if (first == kZeroBlock) {
    for (int i = 0; i < kBlock; ++i) to[i] = 0;
    return at + 1;
  }
  if (first != kMaskedBlock) return UnpackElements<T>(at, n, to);
  uint64_t mask = 0;
  std::memcpy(&mask, at + 1, BitBytes(n));
  if (mask == 0 || (n < kBlock && mask >> n != 0)) return nullptr;
  T values[kBlock + 1] = {};
  at = UnpackElements<T>(at + 1 + BitBytes(n), std::popcount(mask), values);
  if (at == nullptr) return nullptr;
  int taken = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int bit = static_cast<int>(mask >> i & 1);
    to[i] = static_cast<T>(values[taken] & static_cast<T>(-bit));
    taken += bit;
  }
  return at;
}

template <typename T>
bool UnpackBlocks(Place at, Place end, int64_t count, std::byte* data) {
  // Near its end the input is read from a copy with room behind it.
  std::array<std::byte, 2 * kBlockRoom> copy;
  bool copied = false;
  T values[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    if (!copied && end - at < static_cast<int64_t>(kBlockRoom)) {
      const auto left = static_cast<size_t>(end - at);
      copy = {};
      std::memcpy(copy.data(), at, left);
      at = copy.data();
      end = at + left;
      copied = true;
    }
    if (at == end) return false;
    const auto n = static_cast<int>(std::min<int64_t>(kBlock, count - begin));
    at = UnpackBlock<T>(at, n, values);
    if (at == nullptr || at > end) return false;
    std::memcpy(data + begin * static_cast<int64_t>(sizeof(T)), values,
                static_cast<size_t>(n) * sizeof(T));
  }
  return at == end;
}

}  // namespace

bool CanPackFloats(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kBFloat16; }

size_t PackFloatsRoom(int64_t count, DType dtype) {
  const size_t blocks = static_cast<size_t>(count + kBlock - 1) / kBlock;
  // A mask that is not worth it costs 9 bytes, and a byte the choice.
  return 1 + static_cast<size_t>(count) * SizeOf(dtype) + 10 * blocks + kBlockRoom;
}

size_t PackFloats(const void* data, int64_t count, DType dtype, std::span<std::byte> out) {
  const auto* from = static_cast<const std::byte*>(data);
  const size_t raw = static_cast<size_t>(count) * SizeOf(dtype);
  const size_t packed = dtype == DType::kFloat32 ? PackBlocks<uint32_t>(from, count, out.data())
                                                 : PackBlocks<uint16_t>(from, count, out.data());
  if (packed <= raw) return packed;
  out[0] = static_cast<std::byte>(kRawForm);
  if (raw > 0) std::memcpy(out.data() + 1, from, raw);
  return 1 + raw;
}

Status UnpackFloats(std::span<const std::byte> bytes, int64_t count, DType dtype, void* data) {
  auto* to = static_cast<std::byte*>(data);
  const size_t raw = static_cast<size_t>(count) * SizeOf(dtype);
  bool ok = false;
  if (!bytes.empty() && bytes[0] == static_cast<std::byte>(kRawForm)) {
    ok = bytes.size() == 1 + raw;
    if (ok && raw > 0) std::memcpy(to, bytes.data() + 1, raw);
  } else if (!bytes.empty() && bytes[0] == static_cast<std::byte>(kBlockForm)) {
    Place at = bytes.data() + 1, end = bytes.data() + bytes.size();
    ok = dtype == DType::kFloat32 ? UnpackBlocks<uint32_t>(at, end, count, to)
                                  : UnpackBlocks<uint16_t>(at, end, count, to);
  }
  if (ok) return Status::Ok();
  return Status::InvalidArgument("float pack: " + std::to_string(bytes.size()) +
                                 " bytes are no packing of " + std::to_string(count) + " elements");
}

}  // namespace dad
