// The part that dense sums and Adasum share: a range of n elements is cut into one
// contiguous piece per rank,
//   piece p = elements  n*p/W .. n*(p+1)/W,
// and rank p owns piece p. All contributions to a piece go to its owner; the owner's
// result goes to all. Each rank sends and receives 2 n (W-1)/W elements.
//
// With `pack` pieces travel packed (packed_piece.h), a result packed once for all.
//
// In place (output is input) is right: a result for piece p comes only after owner p
// has our contribution to piece p, and our own piece is sent to nobody.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "dad/status.h"
#include "exchange/exchange.h"
#include "exchange/share/packed_piece.h"
#include "util/aligned_buffer.h"
#include "util/gather_buffer.h"

namespace dad {

class OwnerPieces {
 public:
  // `spec` must outlive this.
  OwnerPieces(const TensorSpec& spec, Slice slice, bool pack = false);

  Status Begin(const StepInput& input, const Group& group);

  // Whether piece p travels packed, both ways.
  bool Packs(int p) const { return pack_ && PacksPiece(spec_, CountOf(p)); }

  // Contributions to owners. Bytes are -1 for those that say their length.
  void SendContribution(int peer, GatherBuffer& out) const;
  bool ContributionSaysLength(int peer) const { return input_ != nullptr && Packs(peer); }
  int64_t ContributionBytes(int peer) const;
  // Everybody's contribution to our piece, in rank order; null for ranks that have joined.
  // Valid as long as the shares.
  Result<std::span<const void* const>> TakeContributions(std::span<const ByteSpan> shares);

  // Results from owners. Ours is sent from memory of our own: the user may change the
  // output as soon as the step is done.
  std::span<std::byte> OwnResult();        // to be filled; where it is packed, the output itself
  void ResultIsThere();                    // packs it
  std::span<std::byte> OwnOutput() const;  // where it goes as well; empty if we have joined
  void SendResult(GatherBuffer& out) const;
  int64_t ResultBytes(int peer) const { return Packs(peer) ? -1 : PieceBytes(peer); }
  // Empty if it comes packed.
  std::span<std::byte> ResultDestination(int peer) const;
  // Copies what is not at its destination yet.
  Status TakeResults(std::span<const ByteSpan> shares);

  const Group& group() const { return group_; }
  int64_t own_count() const { return CountOf(group_.rank); }

 private:
  int64_t BeginOf(int p) const { return slice_.count * p / group_.size; }
  int64_t CountOf(int p) const { return BeginOf(p + 1) - BeginOf(p); }
  int64_t PieceBytes(int p) const { return CountOf(p) * element_bytes_; }
  std::span<std::byte> OutputOf(int p) const;  // empty if we have joined

  const TensorSpec& spec_;
  const Slice slice_;
  const bool pack_;
  const int64_t element_bytes_;
  Group group_;
  const std::byte* input_ = nullptr;  // of the slice; null if we have joined
  std::byte* output_ = nullptr;
  std::vector<const void*> contributions_;
  AlignedBuffer unpacked_;  // contributions that came packed
  AlignedBuffer result_;    // kept between steps
  PackedPiece packed_result_;
};

}  // namespace dad
