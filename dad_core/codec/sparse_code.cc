#include "codec/sparse_code.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

// The loops below are worth vectorising at any -O level of the build.
#pragma GCC optimize("O3")

namespace dad {
namespace {

constexpr int kMaxK = 31;
// Bits of a word that are good whatever bit of its first byte one begins with.
constexpr unsigned kLoadBits = 57;

bool IsWidth(int value_bits) { return value_bits >= 0 && value_bits <= 8; }

uint64_t CodeBytes(uint64_t count, int value_bits) {
  return (count * static_cast<uint64_t>(value_bits) + 7) / 8;
}

size_t VarintBytes(uint64_t value) {
  return (static_cast<size_t>(std::bit_width(value | 1)) + 6) / 7;
}

uint64_t Load64(const std::byte* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}
void Store64(std::byte* to, uint64_t word) { std::memcpy(to, &word, sizeof word); }

// Σ gap >> k: the bits 0 of all quotients.
uint64_t SumOfQuotients(std::span<const uint32_t> index, int k) {
  if (index.empty()) return 0;
  uint64_t sum = index[0] >> k;
  constexpr size_t kChunk = 4096;
  for (size_t begin = 1; begin < index.size(); begin += kChunk) {
    const size_t n = std::min(kChunk, index.size() - begin);
    const uint32_t* at = index.data() + begin;
    const uint32_t* before = at - 1;
    // Together the gaps of a chunk are less than 2^32: no widening in the loop.
    uint32_t chunk = 0;
    for (size_t i = 0; i < n; ++i) chunk += (at[i] - before[i] - 1) >> k;
    sum += chunk;
  }
  return sum;
}

struct Parameter {
  int k = 0;
  uint64_t quotients = 0;  // SumOfQuotients at k
};

// The least k that gives the fewest bits. What k + 1 costs more than k, count - Σ ⌈(gap >> k) / 2⌉,
// grows with k, so there is one valley; the mean gap says roughly where.
Parameter BestParameter(std::span<const uint32_t> index) {
  const uint64_t count = index.size();
  const uint64_t sum = uint64_t{index.back()} + 1 - count;
  // For geometric gaps of mean m the best k is ⌊log2(0.962 (m + 1/2))⌋ (A. Kiely, 2004).
  Parameter best;
  while (best.k < kMaxK && ((count << (best.k + 1)) << 10) <= 493 * (2 * sum + count)) ++best.k;
  best.quotients = SumOfQuotients(index, best.k);
  bool fell = false;
  while (best.k > 0) {
    const uint64_t below = SumOfQuotients(index, best.k - 1);
    if (below > best.quotients + count) break;
    best = {best.k - 1, below};
    fell = true;
  }
  while (!fell && best.k < kMaxK) {
    const uint64_t above = SumOfQuotients(index, best.k + 1);
    if (above + count >= best.quotients) break;
    best = {best.k + 1, above};
  }
  return best;
}

uint64_t GapBytes(uint64_t count, const Parameter& parameter) {
  return (count * static_cast<uint64_t>(1 + parameter.k) + parameter.quotients + 7) / 8;
}

std::byte* WriteVarint(uint64_t value, std::byte* out) {
  for (; value >= 0x80; value >>= 7) *out++ = static_cast<std::byte>(value | 0x80);
  *out++ = static_cast<std::byte>(value);
  return out;
}

// Codes of any width, eight at a time: they fill `value_bits` whole bytes.
void PackWideCodes(std::span<const uint8_t> code, int value_bits, std::byte* out) {
  const auto width = static_cast<unsigned>(value_bits);
  const uint64_t mask = (uint64_t{1} << width) - 1;
  for (size_t i = 0; i < code.size(); i += 8) {
    const size_t n = std::min<size_t>(8, code.size() - i);
    uint64_t bits = 0;
    for (size_t j = 0; j < n; ++j) bits |= (code[i + j] & mask) << (width * j);
    std::memcpy(out, &bits, (n * width + 7) / 8);
    out += width;
  }
}

void UnpackWideCodes(const std::byte* in, size_t count, int value_bits, uint8_t* code) {
  const auto width = static_cast<unsigned>(value_bits);
  const uint64_t mask = (uint64_t{1} << width) - 1;
  for (size_t i = 0; i < count; i += 8) {
    const size_t n = std::min<size_t>(8, count - i);
    uint64_t bits = 0;
    std::memcpy(&bits, in, (n * width + 7) / 8);
    for (size_t j = 0; j < n; ++j) code[i + j] = static_cast<uint8_t>(bits >> (width * j) & mask);
    in += width;
  }
}

void PackCodes(std::span<const uint8_t> code, int value_bits, std::byte* out) {
  const size_t count = code.size();
  if (value_bits == 4) {
    for (size_t i = 0; i < count / 2; ++i) {
      out[i] = static_cast<std::byte>((code[2 * i] & 15) | (code[2 * i + 1] << 4));
    }
    if (count % 2 != 0) out[count / 2] = static_cast<std::byte>(code[count - 1] & 15);
    return;
  }
  if (value_bits != 1) return PackWideCodes(code, value_bits, out);
  constexpr uint64_t kOnes = 0x0101010101010101;
  for (size_t i = 0; i < count; i += 8) {
    uint64_t eight = 0;
    std::memcpy(&eight, code.data() + i, std::min<size_t>(8, count - i));
    // Byte j goes to bit j of the topmost byte.
    out[i / 8] = static_cast<std::byte>(((eight & kOnes) * 0x0102040810204080) >> 56);
  }
}

void UnpackCodes(const std::byte* in, size_t count, int value_bits, uint8_t* code) {
  if (value_bits == 4) {
    for (size_t i = 0; i < count / 2; ++i) {
      code[2 * i] = static_cast<uint8_t>(in[i]) & 15;
      code[2 * i + 1] = static_cast<uint8_t>(in[i]) >> 4;
    }
    if (count % 2 != 0) code[count - 1] = static_cast<uint8_t>(in[count / 2]) & 15;
    return;
  }
  if (value_bits != 1) return UnpackWideCodes(in, count, value_bits, code);
  constexpr uint64_t kOnes = 0x0101010101010101;
  for (size_t i = 0; i < count; i += 8) {
    // Byte j keeps bit j; adding 0x7f moves it to bit 7.
    const uint64_t each = (static_cast<uint64_t>(in[i / 8]) * kOnes) & 0x8040201008040201;
    const uint64_t eight = ((each + 0x7f7f7f7f7f7f7f7f) >> 7) & kOnes;
    std::memcpy(code + i, &eight, std::min<size_t>(8, count - i));
  }
}

// `out` is 0 and has 8 bytes more than the stream, which stay 0.
void WriteGaps(std::span<const uint32_t> index, int k, std::byte* out) {
  const uint64_t mask = (uint64_t{1} << k) - 1;
  const auto width = static_cast<unsigned>(k);
  uint64_t pending = 0;  // bits that are not yet a whole byte, fewer than 8
  unsigned num_pending = 0;
  uint32_t next = 0;
  for (const uint32_t i : index) {
    const uint64_t gap = i - next;
    next = i + 1;
    uint64_t quotient = gap >> k;
    if (quotient + 1 + width >= kLoadBits) [[unlikely]] {
      // Skips all but a few of the zeros. They are at least two bytes, so nothing is pending.
      constexpr uint64_t kLeft = 8;
      const uint64_t zeros = quotient - kLeft + num_pending;
      out += zeros / 8;
      num_pending = static_cast<unsigned>(zeros % 8);
      pending = 0;
      quotient = kLeft;
    }
    const uint64_t bits = (((gap & mask) << 1) | 1) << quotient;
    pending |= bits << num_pending;
    num_pending += static_cast<unsigned>(quotient) + 1 + width;
    Store64(out, pending);
    out += num_pending / 8;
    pending >>= num_pending & ~7u;
    num_pending &= 7;
  }
}

void EncodeWords(std::span<const uint32_t> index, std::span<const uint8_t> code, int value_bits,
                 std::byte* out) {
  const size_t count = index.size();
  if (value_bits == 0) {
    if (count > 0) std::memcpy(out, index.data(), count * sizeof(uint32_t));
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    const uint32_t word = index[i] | static_cast<uint32_t>(code[i]) << (32 - value_bits);
    std::memcpy(out + i * sizeof word, &word, sizeof word);
  }
}

}  // namespace

void EncodeSparse(Coding coding, int64_t extent, std::span<const uint32_t> index,
                  std::span<const uint8_t> code, int value_bits, std::vector<std::byte>& out) {
  (void)extent;  // a bound that the caller keeps, and the decoder checks
  const size_t count = index.size();
  const size_t begin = out.size();
  const size_t head = VarintBytes(count);
  if (coding == Coding::kWord || count == 0) {
    out.resize(begin + head + count * sizeof(uint32_t));
    EncodeWords(index, code, value_bits, WriteVarint(count, out.data() + begin));
    return;
  }
  const Parameter best = BestParameter(index);
  const size_t code_bytes = CodeBytes(count, value_bits);
  const size_t bytes = head + 1 + code_bytes + GapBytes(count, best);
  out.resize(begin + bytes + sizeof(uint64_t));
  std::byte* to = WriteVarint(count, out.data() + begin);
  *to++ = static_cast<std::byte>(best.k);
  if (value_bits != 0) PackCodes(code.first(count), value_bits, to);
  WriteGaps(index, best.k, to + code_bytes);
  out.resize(begin + bytes);
}

int64_t SparseBytes(Coding coding, std::span<const uint32_t> index, int value_bits) {
  const size_t count = index.size();
  const size_t head = VarintBytes(count);
  if (coding == Coding::kWord || count == 0) {
    return static_cast<int64_t>(head + count * sizeof(uint32_t));
  }
  return static_cast<int64_t>(head + 1 + CodeBytes(count, value_bits) +
                              GapBytes(count, BestParameter(index)));
}

Status DecodeSparse(Coding coding, int64_t extent, int value_bits, ByteReader& in,
                    std::vector<uint32_t>& index, std::vector<uint8_t>& code) {
  SparseReader reader(coding, extent, value_bits, in);
  const auto count = static_cast<size_t>(reader.count());
  index.resize(count);
  code.resize(value_bits == 0 ? 0 : count);
  for (size_t at = 0; at < count && reader.status().ok(); at += SparseReader::kBlock) {
    (void)reader.Decode(std::min(SparseReader::kBlock, count - at), index.data() + at,
                        value_bits == 0 ? nullptr : code.data() + at);
  }
  return reader.status();
}

SparseReader::SparseReader(Coding coding, int64_t extent, int value_bits, ByteReader& in)
    : coding_(coding),
      value_bits_(value_bits),
      extent_(static_cast<uint64_t>(std::max<int64_t>(extent, 0))),
      in_(in) {
  Open(extent);
}

void SparseReader::Open(int64_t extent) {
  if (!IsWidth(value_bits_) || extent < 0 || extent > MaxSparseExtent(value_bits_) ||
      coding_ > Coding::kRice) {
    return Fail("no such coding");
  }
  const uint64_t count = in_.Varint();
  if (!in_.ok()) return Fail("cut short");
  if (count > extent_) return Fail("more elements than there are");
  if (count == 0) return;
  ByteReader ahead = in_;
  if (coding_ == Coding::kWord) {
    // Divided, so that nothing overflows.
    if (count > in_.left() / sizeof(uint32_t)) return Fail("cut short");
  } else {
    const auto k = ahead.Value<uint8_t>();
    if (k > kMaxK) return Fail("Rice parameter out of range");
    k_ = k;
    codes_ = ahead.Take(CodeBytes(count, value_bits_));
    // A gap has at least k + 1 bits.
    if (!ahead.ok() || (count * (1 + uint64_t{k}) + 7) / 8 > ahead.left()) {
      return Fail("cut short");
    }
  }
  rest_ = ahead.Take(ahead.left());
  count_ = static_cast<int64_t>(count);
}

bool SparseReader::Next() {
  size_ = 0;
  if (done_ == count_ || !status_.ok()) return false;
  const auto n = std::min<int64_t>(kBlock, count_ - done_);
  if (!Decode(static_cast<size_t>(n), index_, code_)) return false;
  size_ = static_cast<size_t>(n);
  return true;
}

bool SparseReader::Decode(size_t n, uint32_t* index, uint8_t* code) {
  if (coding_ == Coding::kWord) {
    if (!DecodeWords(n, index, code)) return false;
  } else {
    if (value_bits_ != 0) {
      // Blocks begin at whole bytes.
      const size_t begin = static_cast<size_t>(done_) * static_cast<size_t>(value_bits_) / 8;
      UnpackCodes(codes_.data() + begin, n, value_bits_, code);
    }
    if (!DecodeGaps(n, index)) return false;
  }
  done_ += static_cast<int64_t>(n);
  if (done_ == count_) End();
  return status_.ok();
}

bool SparseReader::DecodeWords(size_t n, uint32_t* index, uint8_t* code) {
  const std::byte* from = rest_.data() + static_cast<size_t>(done_) * sizeof(uint32_t);
  if (value_bits_ == 0) {
    std::memcpy(index, from, n * sizeof(uint32_t));
  } else {
    const int index_bits = 32 - value_bits_;
    const uint32_t mask = (uint32_t{1} << index_bits) - 1;
    for (size_t i = 0; i < n; ++i) {
      uint32_t word;
      std::memcpy(&word, from + i * sizeof word, sizeof word);
      index[i] = word & mask;
      code[i] = static_cast<uint8_t>(word >> index_bits);
    }
  }
  uint32_t falls = index[0] < next_ ? 1 : 0;
  for (size_t i = 1; i < n; ++i) falls |= index[i] <= index[i - 1] ? 1 : 0;
  next_ = uint64_t{index[n - 1]} + 1;
  if (falls != 0) {
    Fail("indices that do not rise");
  } else if (next_ > extent_) {
    Fail("an index beyond the tensor");
  }
  return status_.ok();
}

// Within a call `next` grows by less than 2^48: an overflow is no matter, the check at the end
// is enough.
bool SparseReader::DecodeGaps(size_t n, uint32_t* index) {
  const std::byte* const data = rest_.data();
  const unsigned k = k_;
  const uint64_t mask = (uint64_t{1} << k) - 1;
  // The last bit from which a whole word can be loaded, and one more.
  const uint64_t fast_end = rest_.size() < 8 ? 0 : (rest_.size() - 8) * 8 + 8;
  // Gaps that one load mostly has. A number that stays the same is foretold by the CPU, one that
  // depends on the bits is not.
  const size_t group = std::max<size_t>(1, 44 / (k + 2));
  uint64_t bit = bit_;
  uint64_t next = next_;
  for (size_t i = 0; i < n;) {
    unsigned used = 0;
    if (bit < fast_end) [[likely]] {
      // The bit behind the good ones ends every quotient: a gap that takes it is too long.
      uint64_t word = Load64(data + bit / 8) >> (bit % 8) | uint64_t{1} << kLoadBits;
      const size_t end = std::min(n, i + group);
      do {
        const auto quotient = static_cast<unsigned>(__builtin_ctzll(word));
        const unsigned length = quotient + 1 + k;
        if (used + length > kLoadBits) [[unlikely]]
          break;
        next += (uint64_t{quotient} << k) | (word >> 1 >> quotient & mask);
        index[i++] = static_cast<uint32_t>(next++);
        used += length;
        word >>= length;
      } while (i < end);
      bit += used;
    }
    if (used == 0) [[unlikely]] {
      uint64_t gap = 0;
      bit_ = bit;
      if (!DecodeLongGap(&gap)) return false;
      bit = bit_;
      next += gap;
      index[i++] = static_cast<uint32_t>(next++);
    }
  }
  bit_ = bit;
  next_ = next;
  if (next > extent_) Fail("an index beyond the tensor");
  return status_.ok();
}

// A gap with a long quotient, or near the end of the input.
bool SparseReader::DecodeLongGap(uint64_t* gap) {
  const std::span<const std::byte> bytes = rest_;
  const uint64_t end = bytes.size() * 8;
  const unsigned k = k_;
  const uint64_t begin = bit_;
  uint64_t bit = begin;
  for (;; ++bit) {
    if (bit >= end) break;
    const auto rest = static_cast<unsigned>(bytes[bit / 8]) >> (bit % 8);
    if (rest != 0) {
      bit += static_cast<unsigned>(std::countr_zero(rest));
      break;
    }
    bit |= 7;
  }
  if (end - std::min(bit, end) < 1 + k) {
    Fail("cut short");
    return false;
  }
  // Also keeps what follows from overflowing.
  const uint64_t quotient = bit - begin;
  if (quotient > extent_ >> k) {
    Fail("an index beyond the tensor");
    return false;
  }
  ++bit;
  uint64_t low = 0;
  for (unsigned i = 0; i < k; ++i, ++bit) {
    low |= (static_cast<uint64_t>(bytes[bit / 8]) >> (bit % 8) & 1) << i;
  }
  *gap = quotient << k | low;
  bit_ = bit;
  return true;
}

void SparseReader::End() {
  if (coding_ == Coding::kWord) {
    in_.Take(static_cast<uint64_t>(count_) * sizeof(uint32_t));
    return;
  }
  const uint64_t used_codes = static_cast<uint64_t>(count_) * static_cast<uint64_t>(value_bits_);
  const auto last_code = codes_.empty() ? 0u : static_cast<unsigned>(codes_.back());
  const auto last_gap = static_cast<unsigned>(rest_[(bit_ - 1) / 8]);
  const bool stray = (used_codes % 8 != 0 && last_code >> (used_codes % 8) != 0) ||
                     (bit_ % 8 != 0 && last_gap >> (bit_ % 8) != 0);
  if (stray) return Fail("unused bits that are not 0");
  in_.Take(1 + codes_.size() + (bit_ + 7) / 8);
}

void SparseReader::Fail(const char* what) {
  status_ = Status::InvalidArgument(std::string("sparse code: ") + what);
  count_ = 0;
  done_ = 0;
  in_.Take(~uint64_t{0});  // not ok from here on
}

}  // namespace dad
