#include "exchange/collective/owner_pieces.h"

#include <cstring>

#include "exchange/share/shares.h"

namespace dad {

OwnerPieces::OwnerPieces(const TensorSpec& spec, Slice slice, bool pack)
    : spec_(spec),
      slice_(slice),
      pack_(pack),
      element_bytes_(static_cast<int64_t>(SizeOf(spec.dtype))) {}

Status OwnerPieces::Begin(const StepInput& input, const Group& group) {
  if (input.mine != nullptr) DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, true));
  group_ = group;
  const bool has_elements = input.mine != nullptr && slice_.count > 0;
  const int64_t offset = slice_.begin * element_bytes_;
  input_ = has_elements ? input.mine->input.bytes() + offset : nullptr;
  output_ = has_elements ? input.mine->output.bytes() + offset : nullptr;
  return Status::Ok();
}

void OwnerPieces::SendContribution(int peer, GatherBuffer& out) const {
  if (input_ == nullptr) return;
  const std::byte* piece = input_ + BeginOf(peer) * element_bytes_;
  if (Packs(peer)) return PackedPiece(spec_, piece, CountOf(peer)).AppendTo(out);
  out.Reference(piece, static_cast<size_t>(PieceBytes(peer)));
}

int64_t OwnerPieces::ContributionBytes(int peer) const {
  return group_.Joined(peer) ? 0 : ResultBytes(group_.rank);
}

Result<std::span<const void* const>> OwnerPieces::TakeContributions(
    std::span<const ByteSpan> shares) {
  contributions_.assign(static_cast<size_t>(group_.size), nullptr);
  const bool packed = Packs(group_.rank);
  const auto piece_bytes = static_cast<size_t>(PieceBytes(group_.rank));
  if (packed) unpacked_ = AlignedBuffer(static_cast<size_t>(group_.size) * piece_bytes);
  for (int r = 0; r < group_.size; ++r) {
    const size_t i = static_cast<size_t>(r);
    if (r == group_.rank) {
      if (input_ != nullptr) contributions_[i] = input_ + BeginOf(r) * element_bytes_;
      continue;
    }
    if (packed && !group_.Joined(r)) {
      std::byte* to = unpacked_.data() + i * piece_bytes;
      DAD_RETURN_IF_ERROR(UnpackPiece(spec_, r, shares[i], own_count(), to));
      contributions_[i] = to;
      continue;
    }
    DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[i], ContributionBytes(r)));
    if (!group_.Joined(r)) contributions_[i] = shares[i].data();
  }
  return std::span<const void* const>(contributions_);
}

std::span<std::byte> OwnerPieces::OwnResult() {
  if (Packs(group_.rank) && output_ != nullptr) return OwnOutput();
  const size_t num_bytes = static_cast<size_t>(PieceBytes(group_.rank));
  if (result_.size() < num_bytes) result_ = AlignedBuffer(num_bytes);
  return result_.span().first(num_bytes);
}

void OwnerPieces::ResultIsThere() {
  unpacked_ = AlignedBuffer();
  if (Packs(group_.rank)) packed_result_ = PackedPiece(spec_, OwnResult().data(), own_count());
}

std::span<std::byte> OwnerPieces::OwnOutput() const { return OutputOf(group_.rank); }

void OwnerPieces::SendResult(GatherBuffer& out) const {
  if (Packs(group_.rank)) return packed_result_.AppendTo(out);
  out.Reference(result_.data(), static_cast<size_t>(PieceBytes(group_.rank)));
}

std::span<std::byte> OwnerPieces::ResultDestination(int peer) const {
  return Packs(peer) ? std::span<std::byte>{} : OutputOf(peer);
}

std::span<std::byte> OwnerPieces::OutputOf(int p) const {
  if (output_ == nullptr) return {};
  return {output_ + BeginOf(p) * element_bytes_, static_cast<size_t>(PieceBytes(p))};
}

Status OwnerPieces::TakeResults(std::span<const ByteSpan> shares) {
  packed_result_ = PackedPiece();
  for (int p = 0; p < group_.size; ++p) {
    if (p == group_.rank) continue;
    const ByteSpan share = shares[static_cast<size_t>(p)];
    const std::span<std::byte> to = OutputOf(p);
    if (Packs(p)) {
      if (!to.empty()) DAD_RETURN_IF_ERROR(UnpackPiece(spec_, p, share, CountOf(p), to.data()));
      continue;
    }
    DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, p, share, ResultBytes(p)));
    if (!to.empty() && to.data() != share.data()) {
      std::memcpy(to.data(), share.data(), share.size());
    }
  }
  return Status::Ok();
}

}  // namespace dad
