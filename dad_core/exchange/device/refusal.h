// A rank that finds out only in the middle of a step that it cannot take part says so in its share.
// All ranks then get one error that names it, and the engine keeps running. Examples are rows whose
// indices, which are on the device, lie outside of the tensor, and a lack of device memory.
//
//   u8 128 | text: which rank, and why
//
// For exchanges whose shares begin with a byte of flags that leaves that bit alone. Where the
// length of a share is known beforehand there may be no room for a text, and lack of memory is the
// only reason:
//
//   u8 2 | u32 the first rank that refused | zeros
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "util/byte_io.h"
#include "util/gather_buffer.h"

namespace dad {

class Refusal {
 public:
  // Call it when a step begins.
  void Clear() { *this = {}; }
  bool there() const { return !why_.empty(); }
  const std::string& why() const { return why_; }

  // This rank's. Several ranks may refuse: they are noted in rank order, and the first counts.
  void Note(int rank, const std::string& why) { Note("rank " + std::to_string(rank) + ": " + why); }
  void Note(const std::string& why) {
    if (why_.empty()) why_ = why;
  }
  // Whether a share that came is one; then it is noted.
  bool Read(std::span<const std::byte> share) {
    ByteReader in(share);
    if (in.Value<uint8_t>() != kFlag) return false;
    const std::string why = in.Text();
    if (!in.AtEnd() || why.empty()) return false;
    Note(why);
    return true;
  }
  void Write(ByteWriter& out) const {
    out.Value(kFlag);
    out.Text(why_);
  }
  // What everybody gets.
  Status status(const TensorSpec& spec) const {
    return Status::FailedPrecondition("\"" + spec.name + "\": " + why_);
  }

  // ---- Of shares whose length is known beforehand.

  static constexpr size_t kShortBytes = 1 + sizeof(uint32_t);  // a share has as many, or more

  // A rank that has not the memory; of several the first counts, in whatever order they are noted.
  void NoteShort(int rank) {
    if (there() && rank >= short_rank_) return;
    short_rank_ = rank;
    why_ = "rank " + std::to_string(rank) + ": out of device memory";
  }
  // Notes a share that came, if it is one; not one that names nobody.
  void ReadShort(std::span<const std::byte> share, int num_ranks) {
    ByteReader in(share);
    if (in.Value<uint8_t>() != kShortFlag) return;
    const auto rank = in.Value<uint32_t>();
    if (in.ok() && rank < static_cast<uint32_t>(num_ranks)) NoteShort(static_cast<int>(rank));
  }
  // Of `num_bytes`, as any other share.
  void WriteShort(size_t num_bytes, GatherBuffer& out) const {
    out.AppendValue(kShortFlag);
    out.AppendValue(static_cast<uint32_t>(short_rank_));
    const std::vector<std::byte> zeros(num_bytes - kShortBytes);
    out.Append(zeros.data(), zeros.size());
  }

  // Why rows cannot be added to a tensor of `rows`; empty if they can.
  static std::string Outside(std::span<const int64_t> index, int64_t rows) {
    for (const int64_t i : index) {
      if (i >= 0 && i < rows) continue;
      return "an index of " + std::to_string(i) + ", expected 0 to " + std::to_string(rows - 1);
    }
    return {};
  }
  // What a rank finds out when the others have its share is its own error, with the same names.
  static Status Late(const TensorSpec& spec, int rank, const Status& status) {
    if (status.ok() || !Is(status)) return status;
    Refusal refusal;
    refusal.Note(rank, status.message());
    return Status::Unavailable(refusal.status(spec).message());
  }
  // Only what may be different in the next step.
  static bool Is(const Status& status) { return status.code() == StatusCode::kUnavailable; }

 private:
  static constexpr uint8_t kFlag = 128;
  static constexpr uint8_t kShortFlag = 2;
  std::string why_;
  int short_rank_ = -1;
};

}  // namespace dad
