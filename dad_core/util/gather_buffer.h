// Bytes to be sent, gathered from many places in order: small pieces are copied
// into the buffer, large ones are referenced where they lie, so that a big tensor
// goes to the wire without a copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "dad/export.h"

namespace dad {

using ByteSpan = std::span<const std::byte>;

class DAD_EXPORT GatherBuffer {
 public:
  // Copies.
  void Append(const void* data, size_t num_bytes);
  void Append(ByteSpan bytes) { Append(bytes.data(), bytes.size()); }
  template <typename T>
  void AppendValue(const T& value) {
    Append(&value, sizeof value);
  }

  // Room for the caller to fill before the next call on this buffer.
  std::span<std::byte> Extend(size_t num_bytes);

  // Does not copy (small ranges excepted): `data` must stay as it is until the
  // message has left. The one who sends says how that is ensured.
  void Reference(const void* data, size_t num_bytes);

  // Keeps what was referenced alive until the message has left.
  void Hold(std::shared_ptr<const void> owner) { held_.push_back(std::move(owner)); }

  // A 64-bit length that is known only after what follows it was added.
  size_t ReserveLength();
  void SetLength(size_t reserved, uint64_t length);

  size_t size() const { return size_; }
  bool has_references() const { return has_references_; }

  // The pieces in order; valid until the buffer changes or dies.
  std::vector<ByteSpan> Pieces() const;

  static constexpr size_t kCopyBelow = 2048;

 private:
  struct Piece {
    const std::byte* referenced;  // null: in store_
    size_t offset;
    size_t num_bytes;
  };
  std::vector<std::byte> store_;
  std::vector<Piece> pieces_;
  std::vector<std::shared_ptr<const void>> held_;
  size_t size_ = 0;
  bool has_references_ = false;
};

}  // namespace dad
