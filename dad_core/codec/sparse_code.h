// A sparse tensor as it travels: the indices of the elements that are sent, strictly rising,
// and a small code for each (what a code stands for is the exchange's matter).
//
// Little endian; a varint is that of util/byte_io.h. value_bits is the width of a code: 1 to 8,
// or 0 for indices alone.
//
//   word   varint count, then count uint32. An index has the low 32 - value_bits bits, the
//          code the bits above: with 4 the sign is bit 31, the magnitude bits 30..28.
//
//   rice   varint count; if that is 0 nothing follows. Else
//          uint8 k, 0..31
//          the codes, ⌈count · value_bits / 8⌉ bytes: the first code in the lowest bits of
//          the first byte (a code may span two bytes), unused bits 0
//          the gaps, a stream of bits that begins with the lowest bit of the first byte, and
//          ends with 0 to 7 bits 0. A gap is index - previous index - 1; for the first
//          index, the index itself. It goes as gap >> k bits 0, a bit 1, and the low k bits
//          of the gap, the lowest first.
//
// An encoder takes the least k that gives the fewest bits; a decoder accepts every k. The
// codes come first so that both streams can be read at once, in blocks.
//
// Decoders read and allocate no more than their input justifies, whatever its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "dad/status.h"
#include "util/byte_io.h"

namespace dad {

enum class Coding : uint8_t { kWord = 0, kRice = 1 };

// A tensor with more elements goes in chunks, with indices from 0 in each: 2^28 elements for 4
// bits, 2^31 for 1, 2^32 for 0. For both codings, so that chunks do not depend on them.
constexpr int64_t MaxSparseExtent(int value_bits) { return int64_t{1} << (32 - value_bits); }

// Appends elements of [0, extent). `index` rises strictly; `code` is as long, or empty when
// value_bits is 0.
void EncodeSparse(Coding coding, int64_t extent, std::span<const uint32_t> index,
                  std::span<const uint8_t> code, int value_bits, std::vector<std::byte>& out);

// What EncodeSparse will append, by counting.
int64_t SparseBytes(Coding coding, std::span<const uint32_t> index, int value_bits);

// Takes one encoding from the front of `in`; the vectors get its size. InvalidArgument if it
// is malformed: cut short, indices that do not rise or are not below `extent`, a count that
// the bytes cannot hold, k out of range, unused bits that are not 0. `in` is then not ok(),
// and the vectors are unspecified.
Status DecodeSparse(Coding coding, int64_t extent, int value_bits, ByteReader& in,
                    std::vector<uint32_t>& index, std::vector<uint8_t>& code);

// The same in blocks, for those who add values to a tensor and need no vectors:
//
//   SparseReader reader(coding, extent, value_bits, in);
//   while (reader.Next()) {
//     for (size_t i = 0; i < reader.index().size(); ++i) {
//       out[reader.index()[i]] += value_of[reader.code()[i]];
//     }
//   }
//   DAD_RETURN_IF_ERROR(reader.status());
//
// A block is checked before it is handed out, so its indices are always good to use; but what
// is malformed further on is found only there, when some of it has been added.
class SparseReader {
 public:
  static constexpr size_t kBlock = 1024;

  // `in` is left behind the encoding when Next has returned false, and must live until then.
  SparseReader(Coding coding, int64_t extent, int value_bits, ByteReader& in);
  SparseReader(const SparseReader&) = delete;
  SparseReader& operator=(const SparseReader&) = delete;

  // Elements of the whole encoding: never more than its bytes can hold. 0 if malformed.
  int64_t count() const { return count_; }

  // Decodes the next block of at most kBlock elements, never an empty one; false at the end,
  // and when something is malformed.
  bool Next();
  std::span<const uint32_t> index() const { return {index_, size_}; }
  std::span<const uint8_t> code() const { return {code_, value_bits_ == 0 ? 0 : size_}; }

  // Ok as long as nothing malformed was met; final once Next has returned false.
  const Status& status() const { return status_; }

 private:
  friend Status DecodeSparse(Coding, int64_t, int, ByteReader&, std::vector<uint32_t>&,
                             std::vector<uint8_t>&);

  void Open(int64_t extent);
  // The next n elements; false if malformed.
  bool Decode(size_t n, uint32_t* index, uint8_t* code);
  bool DecodeWords(size_t n, uint32_t* index, uint8_t* code);
  bool DecodeGaps(size_t n, uint32_t* index);
  bool DecodeLongGap(uint64_t* gap);
  // After the last element: takes the encoding from `in`.
  void End();
  void Fail(const char* what);

  const Coding coding_;
  const int value_bits_;
  const uint64_t extent_;
  ByteReader& in_;
  std::span<const std::byte> codes_;
  std::span<const std::byte> rest_;  // of `in`: the words or gaps, and what comes after them
  unsigned k_ = 0;
  uint64_t bit_ = 0;   // of the gaps, the next one to read
  uint64_t next_ = 0;  // the least index that may come next
  int64_t count_ = 0;
  int64_t done_ = 0;
  Status status_;
  size_t size_ = 0;
  uint32_t index_[kBlock];
  uint8_t code_[kBlock];
};

}  // namespace dad
