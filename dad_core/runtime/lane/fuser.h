// Which tensors share a message: a pure function of their sizes and keys.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "exchange/exchange.h"

namespace dad {

struct FuseItem {
  int request = 0;  // the caller's number, returned in the parts
  int tensor = 0;
  int64_t elements = 0;
  int64_t element_bytes = 0;
  bool elementwise = false;  // may be cut into slices
  uint64_t key = 0;          // only neighbours with equal keys are fused

  int64_t bytes() const { return elements * element_bytes; }
};

struct FusedBatch {
  struct Part {
    int request = 0;
    int tensor = 0;
    Slice slice;
  };
  std::vector<Part> parts;
  int64_t bytes = 0;
};

// Keeps the order; the items of a request follow each other. A batch closes when the next request
// would take it over `fusion_bytes`. An elementwise tensor larger than an eighth of that is cut
// into equal slices, so that one slice is on the wire while another is added up. There are eight of
// them, unless that makes them smaller than the eighth or larger than the whole. A request of
// several batches shares none of them with others, so that its batches start together or not at
// all. 0 fuses nothing and cuts nothing.
std::vector<FusedBatch> Fuse(std::span<const FuseItem> items, int64_t fusion_bytes);

}  // namespace dad
