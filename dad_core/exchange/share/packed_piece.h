// A piece of a dense tensor as it travels where the line is slow: packed without loss
// (codec/float_pack.h). Its length is not known beforehand and goes with it.
#pragma once

#include <cstdint>
#include <memory>

#include "dad/status.h"
#include "exchange/exchange.h"
#include "util/aligned_buffer.h"
#include "util/gather_buffer.h"

namespace dad {

// Whether pieces of so many elements are packed, the same on all ranks. For small ones the length
// and the time count for more.
bool PacksPiece(const TensorSpec& spec, int64_t count);

// Memory is shared with the messages that carry it.
class PackedPiece {
 public:
  PackedPiece() = default;  // none
  PackedPiece(const TensorSpec& spec, const void* data, int64_t count);
  // A packing that came, to be passed on.
  explicit PackedPiece(ByteSpan came);

  void AppendTo(GatherBuffer& out) const;

 private:
  std::shared_ptr<AlignedBuffer> memory_;
  size_t num_bytes_ = 0;
};

// InvalidArgument, naming tensor and rank, unless `share` is a packing of so many elements.
Status UnpackPiece(const TensorSpec& spec, int from_rank, ByteSpan share, int64_t count, void* to);

}  // namespace dad
