#include "exchange/share/packed_piece.h"

#include <cstring>
#include <string>

#include "codec/float_pack.h"

namespace dad {

bool PacksPiece(const TensorSpec& spec, int64_t count) {
  constexpr int64_t kLeast = 256;
  return CanPackFloats(spec.dtype) && count >= kLeast;
}

PackedPiece::PackedPiece(const TensorSpec& spec, const void* data, int64_t count)
    : memory_(std::make_shared<AlignedBuffer>(PackFloatsRoom(count, spec.dtype))),
      num_bytes_(PackFloats(data, count, spec.dtype, memory_->span())) {}

PackedPiece::PackedPiece(ByteSpan came)
    : memory_(std::make_shared<AlignedBuffer>(came.size())), num_bytes_(came.size()) {
  if (!came.empty()) std::memcpy(memory_->data(), came.data(), came.size());
}

void PackedPiece::AppendTo(GatherBuffer& out) const {
  out.Reference(memory_->data(), num_bytes_);
  out.Hold(memory_);
}

Status UnpackPiece(const TensorSpec& spec, int from_rank, ByteSpan share, int64_t count, void* to) {
  const Status status = UnpackFloats(share, count, spec.dtype, to);
  if (status.ok()) return status;
  return Status(status.code(), "\"" + spec.name + "\": rank " + std::to_string(from_rank) +
                                   " sent a malformed piece: " + status.message());
}

}  // namespace dad
