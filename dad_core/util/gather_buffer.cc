#include "util/gather_buffer.h"

namespace dad {

void GatherBuffer::Append(const void* data, size_t num_bytes) {
  if (num_bytes == 0) return;
  std::memcpy(Extend(num_bytes).data(), data, num_bytes);
}

std::span<std::byte> GatherBuffer::Extend(size_t num_bytes) {
  const size_t offset = store_.size();
  store_.resize(offset + num_bytes);
  if (!pieces_.empty() && pieces_.back().referenced == nullptr) {
    pieces_.back().num_bytes += num_bytes;
  } else {
    pieces_.push_back({nullptr, offset, num_bytes});
  }
  size_ += num_bytes;
  return {store_.data() + offset, num_bytes};
}

void GatherBuffer::Reference(const void* data, size_t num_bytes) {
  if (num_bytes < kCopyBelow) return Append(data, num_bytes);
  pieces_.push_back({static_cast<const std::byte*>(data), 0, num_bytes});
  size_ += num_bytes;
  has_references_ = true;
}

size_t GatherBuffer::ReserveLength() {
  Extend(sizeof(uint64_t));
  return store_.size() - sizeof(uint64_t);
}

void GatherBuffer::SetLength(size_t reserved, uint64_t length) {
  std::memcpy(store_.data() + reserved, &length, sizeof length);
}

std::vector<ByteSpan> GatherBuffer::Pieces() const {
  std::vector<ByteSpan> spans;
  spans.reserve(pieces_.size());
  for (const Piece& piece : pieces_) {
    const std::byte* from = piece.referenced ? piece.referenced : store_.data() + piece.offset;
    spans.emplace_back(from, piece.num_bytes);
  }
  return spans;
}

}  // namespace dad
