// The part that dense sums and Adasum share: a range of n elements is cut into one
// contiguous piece per rank,
//   piece p = elements  n*p/W .. n*(p+1)/W,
// and rank p owns piece p. All contributions to a piece go to its owner; the owner's
// result goes to all. Each rank sends and receives 2 n (W-1)/W elements.
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
#include "util/aligned_buffer.h"
#include "util/gather_buffer.h"

namespace dad {

class OwnerPieces {
 public:
  // `spec` must outlive this.
  OwnerPieces(const TensorSpec& spec, Slice slice);

  Status Begin(const StepInput& input, const Group& group);

  // Contributions to owners.
  void SendContribution(int peer, GatherBuffer& out) const;
  int64_t ContributionBytes(int peer) const;
  // Everybody's contribution to our piece, in rank order; null for ranks that have joined.
  // Valid as long as the shares.
  Result<std::span<const void* const>> TakeContributions(std::span<const ByteSpan> shares);

  // Results from owners. Ours is sent from memory of our own: the user may change the
  // output as soon as the step is done.
  std::span<std::byte> OwnResult();        // to be filled
  std::span<std::byte> OwnOutput() const;  // where it goes as well; empty if we have joined
  void SendResult(GatherBuffer& out) const;
  int64_t ResultBytes(int peer) const { return CountOf(peer) * element_bytes_; }
  std::span<std::byte> ResultDestination(int peer) const;
  // Copies what is not at its destination yet.
  Status TakeResults(std::span<const ByteSpan> shares);

  const Group& group() const { return group_; }
  int64_t own_count() const { return CountOf(group_.rank); }

 private:
  int64_t BeginOf(int p) const { return slice_.count * p / group_.size; }
  int64_t CountOf(int p) const { return BeginOf(p + 1) - BeginOf(p); }

  const TensorSpec& spec_;
  const Slice slice_;
  const int64_t element_bytes_;
  Group group_;
  const std::byte* input_ = nullptr;  // of the slice; null if we have joined
  std::byte* output_ = nullptr;
  std::vector<const void*> contributions_;
  AlignedBuffer result_;  // kept between steps
};

}  // namespace dad
