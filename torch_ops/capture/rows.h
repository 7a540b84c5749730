// The rows of convolutions and embeddings, as segments have them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "torch_ops/capture/capture.h"

namespace dad_torch {

// A tensor for a segment: contiguous, without history, and not memory that others may write to.
at::Tensor ForSegment(const at::Tensor& tensor, bool others_memory);

// The parameters of a convolution, for each dimension.
struct Geometry {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups = 1;
};

// Segments of the same samples, of one batch, made one: a weight that is used several times has all
// rows of a sample together then.
std::vector<Segment> MergeUses(std::vector<Segment> segments);

// im2col: groups × (batch · positions) × (channels/groups · kernel). May share memory with x.
at::Tensor Patches(const at::Tensor& x, c10::IntArrayRef kernel, c10::IntArrayRef positions,
                   const Geometry& geometry);
// The gradient at the output in the same order: groups × (batch · positions) × (out/groups).
at::Tensor Deltas(const at::Tensor& grad, int64_t groups);

// Row index[i] gets x[i]; rows with the padding index (negative: none) get nothing: they are left
// out or, with `all_rows` and on a device, zero. x may share memory with what was given, the index
// does not.
Segment IndexedRows(const at::Tensor& index, const at::Tensor& x, int64_t padding_idx,
                    bool all_rows = false);

}  // namespace dad_torch
