#include "torch_ops/capture/rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace dad_torch {

at::Tensor ForSegment(const at::Tensor& tensor, bool others_memory) {
  at::Tensor plain = tensor.detach();
  if (others_memory && plain.is_contiguous()) return plain.clone();
  return plain.contiguous();
}

namespace {

// Where the elements of a strided block are, in row-major order.
std::vector<int64_t> Offsets(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  std::vector<int64_t> offsets = {0};
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    std::vector<int64_t> next;
    next.reserve(offsets.size() * static_cast<size_t>(sizes[dim]));
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < sizes[dim]; ++i) next.push_back(offset + i * strides[dim]);
    }
    offsets = std::move(next);
  }
  return offsets;
}

// How many columns from each on, in equal pieces, are neighbours in memory. 1 also where CopyRuns
// would read more than the last piece has.
int64_t RunLength(const std::vector<int64_t>& columns, int64_t inner) {
  for (size_t i = 0; i + 1 < columns.size(); ++i) {
    const bool last_of_run = static_cast<int64_t>(i + 1) % inner == 0;
    if (!last_of_run && columns[i + 1] != columns[i] + 1) return 1;
    if (last_of_run && columns[i] + inner > columns.back()) return 1;
  }
  return inner;
}

// Copies runs of `kRun` elements to one place after the other. A copy of a power of two is one load
// and one store, so what is copied may reach into the next run, whose copy follows; the last is
// exact.
template <int kRun, typename T>
void CopyRuns(const T* from, const std::vector<int64_t>& starts, T* to) {
  constexpr size_t kWide = std::bit_ceil(static_cast<unsigned>(kRun));
  const size_t last = starts.size() - 1;
  for (size_t i = 0; i < last; ++i, to += kRun) {
    std::memcpy(to, from + starts[i], kWide * sizeof(T));
  }
  std::memcpy(to, from + starts[last], kRun * sizeof(T));
}

// to[i, j] = from[rows[i] + columns[j]], where each `run` columns are neighbours
template <typename T>
void Gather(const T* from, const std::vector<int64_t>& rows, const std::vector<int64_t>& columns,
            int64_t run, T* to) {
  const auto width = static_cast<int64_t>(columns.size());
  std::vector<int64_t> starts;
  for (int64_t j = 0; j < width; j += run) starts.push_back(columns[static_cast<size_t>(j)]);
  const auto copy_row = [&](const T* row, T* out) {
    switch (run) {
      case 2: CopyRuns<2>(row, starts, out); break;
      case 3: CopyRuns<3>(row, starts, out); break;
      case 4: CopyRuns<4>(row, starts, out); break;
      case 5: CopyRuns<5>(row, starts, out); break;
      case 7: CopyRuns<7>(row, starts, out); break;
      default:
        for (int64_t j = 0; j < width; ++j) out[j] = row[columns[static_cast<size_t>(j)]];
    }
  };
  constexpr int64_t kElementsPerTask = 1 << 15;
  at::parallel_for(0, static_cast<int64_t>(rows.size()),
                   kElementsPerTask / std::max<int64_t>(1, width) + 1,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       copy_row(from + rows[static_cast<size_t>(i)], to + i * width);
                     }
                   });
}

}  // namespace

std::vector<Segment> MergeUses(std::vector<Segment> segments) {
  const auto same_samples = [](const Segment& one, const Segment& other) {
    return one.even && other.even && one.batch == other.batch && one.samples == other.samples &&
           one.samples > 0 && one.kind == other.kind && one.out_begin == other.out_begin &&
           one.has_bias == other.has_bias &&
           (one.kind == SegmentKind::kIndexed || one.d.size(1) == other.d.size(1));
  };
  std::vector<std::vector<Segment>> uses;
  for (Segment& segment : segments) {
    const auto found = std::find_if(uses.begin(), uses.end(), [&](const auto& known) {
      return same_samples(known.front(), segment);
    });
    if (found == uses.end()) {
      uses.emplace_back().push_back(std::move(segment));
    } else {
      found->push_back(std::move(segment));
    }
  }
  std::vector<Segment> merged;
  for (std::vector<Segment>& same : uses) {
    Segment& first = same.front();
    if (same.size() > 1) {
      // samples × rows of a sample × columns, one after the other in the middle
      const auto join = [&](at::Tensor Segment::*part) {
        if (!(first.*part).defined()) return;
        std::vector<at::Tensor> parts;
        std::vector<int64_t> shape = (first.*part).sizes().vec();
        for (const Segment& segment : same) {
          const at::Tensor& tensor = segment.*part;
          const int64_t columns = tensor.dim() == 1 ? 1 : tensor.size(1);
          parts.push_back(tensor.view({first.samples, tensor.size(0) / first.samples, columns}));
        }
        shape[0] = -1;
        first.*part = at::cat(parts, 1).view(shape);
      };
      join(&Segment::a);
      join(&Segment::d);
      join(&Segment::index);
      join(&Segment::x);
      first.link.reset();
    }
    merged.push_back(std::move(first));
  }
  return merged;
}

at::Tensor Patches(const at::Tensor& x, c10::IntArrayRef kernel, c10::IntArrayRef positions,
                   const Geometry& geometry) {
  std::vector<int64_t> borders;
  for (auto pad = geometry.padding.rbegin(); pad != geometry.padding.rend(); ++pad) {
    borders.insert(borders.end(), {*pad, *pad});
  }
  const bool padded = std::any_of(borders.begin(), borders.end(), [](int64_t n) { return n != 0; });
  const at::Tensor from = padded ? at::constant_pad_nd(x, borders) : x;

  // The strided view that names every element of every patch: dimensions of a row, then those of
  // a column.
  const int64_t channels = x.size(1) / geometry.groups;
  std::vector<int64_t> sizes = {geometry.groups, x.size(0)};
  std::vector<int64_t> strides = {from.stride(1) * channels, from.stride(0)};
  for (size_t i = 0; i < kernel.size(); ++i) {
    sizes.push_back(positions[i]);
    strides.push_back(from.stride(static_cast<int64_t>(i) + 2) * geometry.stride[i]);
  }
  const size_t row_dims = sizes.size();
  sizes.push_back(channels);
  strides.push_back(from.stride(1));
  for (size_t i = 0; i < kernel.size(); ++i) {
    sizes.push_back(kernel[i]);
    strides.push_back(from.stride(static_cast<int64_t>(i) + 2) * geometry.dilation[i]);
  }
  const int64_t rows = x.size(0) * c10::multiply_integers(positions);
  const int64_t columns = channels * c10::multiply_integers(kernel);
  const c10::IntArrayRef all_sizes = sizes;
  const c10::IntArrayRef all_strides = strides;
  if (!x.device().is_cpu() || columns <= 1) {
    return from.as_strided(sizes, strides, from.storage_offset())
        .reshape({geometry.groups, rows, columns});
  }
  // Six times as fast as torch's copy of such a view, whose inner loop is one kernel row.
  at::Tensor result = at::empty({geometry.groups, rows, columns}, x.options());
  const auto row_offsets = Offsets(all_sizes.slice(0, row_dims), all_strides.slice(0, row_dims));
  const auto column_offsets = Offsets(all_sizes.slice(row_dims), all_strides.slice(row_dims));
  const int64_t run = RunLength(column_offsets, kernel.back());
  const auto gather = [&]<typename T>(T /*element*/) {
    Gather(static_cast<const T*>(from.const_data_ptr()), row_offsets, column_offsets, run,
           static_cast<T*>(result.mutable_data_ptr()));
  };
  switch (from.element_size()) {
    case 2: gather(uint16_t{}); break;
    case 4: gather(uint32_t{}); break;
    default: gather(uint64_t{}); break;
  }
  return result;
}

at::Tensor Deltas(const at::Tensor& grad, int64_t groups) {
  const int64_t out = grad.size(1) / groups;
  const int64_t positions = c10::multiply_integers(grad.sizes().slice(2));
  return grad.reshape({grad.size(0), groups, out, positions})
      .permute({1, 0, 3, 2})
      .reshape({groups, grad.size(0) * positions, out});
}

Segment IndexedRows(const at::Tensor& index, const at::Tensor& x, int64_t padding_idx,
                    bool all_rows) {
  Segment segment;
  segment.kind = SegmentKind::kIndexed;
  segment.index = index.detach();
  segment.x = x;
  // How many rows are left would have to be read from a device; zeros are sent instead.
  if (padding_idx >= 0 && (all_rows || !index.device().is_cpu())) {
    segment.x = x.masked_fill(segment.index.eq(padding_idx).unsqueeze(1), 0);
  } else if (padding_idx >= 0) {
    const at::Tensor kept = segment.index.ne(padding_idx).nonzero().squeeze(1);
    if (kept.size(0) != segment.index.size(0)) {
      segment.index = segment.index.index_select(0, kept);
      segment.x = segment.x.index_select(0, kept);
      segment.even = false;
    }
  }
  // The index comes from the user's batch.
  segment.index = segment.index.to(at::kLong, /*non_blocking=*/false,
                                   /*copy=*/segment.index.is_alias_of(index));
  segment.x = ForSegment(segment.x, /*others_memory=*/false);
  return segment;
}

}  // namespace dad_torch
