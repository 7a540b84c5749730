// An outgoing payload, cut into the parts that single MPI messages carry.
#pragma once

#include <memory>
#include <vector>

#include "util/aligned_buffer.h"
#include "util/gather_buffer.h"

namespace dad::mpi_transport {

class Outgoing {
 public:
  Outgoing(GatherBuffer payload, std::shared_ptr<void> keep);

  // In order. Large pieces stay where they are, runs of small ones are copied together; no part
  // exceeds an MPI count.
  const std::vector<ByteSpan>& parts() const { return parts_; }

 private:
  void AddPart(ByteSpan bytes);
  void AddCopyOf(std::span<const ByteSpan> pieces);

  const GatherBuffer payload_;
  const std::shared_ptr<void> keep_;
  std::vector<AlignedBuffer> copies_;
  std::vector<ByteSpan> parts_;
};

}  // namespace dad::mpi_transport
