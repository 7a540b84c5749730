#include "capture_rows.h"

#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>

namespace dad_torch {

at::Tensor ForSegment(const at::Tensor& tensor, bool others_memory) {
  at::Tensor plain = tensor.detach();
  if (others_memory && plain.is_contiguous()) return plain.clone();
  return plain.contiguous();
}

// With one copy: a strided view names every element of every patch.
at::Tensor Patches(const at::Tensor& x, c10::IntArrayRef kernel, c10::IntArrayRef positions,
                   const Geometry& geometry) {
  std::vector<int64_t> borders;
  for (auto pad = geometry.padding.rbegin(); pad != geometry.padding.rend(); ++pad) {
    borders.insert(borders.end(), {*pad, *pad});
  }
  const bool padded = std::any_of(borders.begin(), borders.end(), [](int64_t n) { return n != 0; });
  const at::Tensor from = padded ? at::constant_pad_nd(x, borders) : x;

  const int64_t channels = x.size(1) / geometry.groups;
  std::vector<int64_t> sizes = {geometry.groups, x.size(0)};
  std::vector<int64_t> strides = {from.stride(1) * channels, from.stride(0)};
  for (size_t i = 0; i < kernel.size(); ++i) {
    sizes.push_back(positions[i]);
    strides.push_back(from.stride(static_cast<int64_t>(i) + 2) * geometry.stride[i]);
  }
  sizes.push_back(channels);
  strides.push_back(from.stride(1));
  for (size_t i = 0; i < kernel.size(); ++i) {
    sizes.push_back(kernel[i]);
    strides.push_back(from.stride(static_cast<int64_t>(i) + 2) * geometry.dilation[i]);
  }
  const int64_t rows = x.size(0) * c10::multiply_integers(positions);
  const int64_t columns = channels * c10::multiply_integers(kernel);
  return from.as_strided(sizes, strides, from.storage_offset())
      .reshape({geometry.groups, rows, columns});
}

at::Tensor Deltas(const at::Tensor& grad, int64_t groups) {
  const int64_t out = grad.size(1) / groups;
  const int64_t positions = c10::multiply_integers(grad.sizes().slice(2));
  return grad.reshape({grad.size(0), groups, out, positions})
      .permute({1, 0, 3, 2})
      .reshape({groups, grad.size(0) * positions, out});
}

Segment IndexedRows(const at::Tensor& index, const at::Tensor& x, int64_t padding_idx) {
  Segment segment;
  segment.kind = SegmentKind::kIndexed;
  segment.index = index.detach();
  segment.x = x;
  if (padding_idx >= 0) {
    const at::Tensor kept = segment.index.ne(padding_idx).nonzero().squeeze(1);
    if (kept.size(0) != segment.index.size(0)) {
      segment.index = segment.index.index_select(0, kept);
      segment.x = segment.x.index_select(0, kept);
    }
  }
  // The index comes from the user's batch.
  segment.index = segment.index.to(at::kLong, /*non_blocking=*/false,
                                   /*copy=*/segment.index.is_alias_of(index));
  segment.x = ForSegment(segment.x, /*others_memory=*/false);
  return segment;
}

}  // namespace dad_torch
