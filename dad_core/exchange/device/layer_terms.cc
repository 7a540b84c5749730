#include "exchange/device/layer_terms.h"

#include <span>
#include <string>
#include <utility>

#include "exchange/device/refusal.h"

namespace dad {

void LayerTerms::Begin(const LayerInput& layer, int64_t m, float scale) {
  layer_ = &layer;
  m_ = m;
  scale_ = scale;
}

Result<std::vector<DeviceRows>> LayerTerms::Rows(DeviceArena& arena) {
  std::vector<DeviceRows> rows;
  for (const RowsSegment& segment : layer_->rows) {
    const auto d = ValuesOf<float>(bench_, segment.d, arena);
    if (!d.ok()) return d.status();
    const auto a = ValuesOf<float>(bench_, segment.a, arena);
    if (!a.ok()) return a.status();
    const int64_t out_count = segment.d.shape[1];
    rows.push_back({d.value(), a.value(), segment.a.shape[0],
                    out_count == m_ ? 0 : segment.out_begin, out_count, segment.a.shape[1],
                    scale_});
  }
  return rows;
}

Status LayerTerms::Add(DeviceLowRankSide& side, DeviceArena& arena) {
  const Result<std::vector<DeviceRows>> rows = Rows(arena);
  if (!rows.ok()) return rows.status();
  for (const DeviceRows& term : rows.value()) DAD_RETURN_IF_ERROR(side.AddRows(term));
  const auto dense = ValuesOf<float>(bench_, layer_->dense, arena);
  if (!dense.ok()) return dense.status();
  const auto bias = ValuesOf<float>(bench_, layer_->dense_bias, arena);
  if (!bias.ok()) return bias.status();
  DAD_RETURN_IF_ERROR(side.AddDense(dense.value(), bias.value(), scale_));
  if (layer_->indexed.empty()) return Status::Ok();
  size_t num_bytes = 0;
  for (const IndexedSegment& segment : layer_->indexed) num_bytes += segment.index.num_bytes();
  const Result<std::byte*> pinned = pinned_.Take(bench_, num_bytes);
  if (!pinned.ok()) return pinned.status();
  std::byte* to = pinned.value();
  for (const IndexedSegment& segment : layer_->indexed) {
    DAD_RETURN_IF_ERROR(bench_.WaitFor(segment.index));
    DAD_RETURN_IF_ERROR(bench_.Copy(to, segment.index.data, segment.index.num_bytes()));
    to += segment.index.num_bytes();
  }
  index_on_host_ = pinned.value();
  return Status::Ok();
}

Status LayerTerms::AddIndexed(DeviceLowRankSide& side, DeviceArena& arena) {
  const auto* next = reinterpret_cast<const int64_t*>(std::exchange(index_on_host_, nullptr));
  for (const IndexedSegment& segment : layer_->indexed) {
    const int64_t rows = segment.index.num_elements();
    const std::span<const int64_t> found(next, static_cast<size_t>(rows));
    next += rows;
    if (const std::string why = Refusal::Outside(found, m_); !why.empty()) {
      return Status::Unavailable(why);
    }
    const std::vector<uint32_t> index(found.begin(), found.end());
    const auto x = ValuesOf<float>(bench_, segment.x, arena);
    if (!x.ok()) return x.status();
    DAD_RETURN_IF_ERROR(side.AddIndexed(x.value(), index, scale_));
  }
  return Status::Ok();
}

void LayerTerms::End(const DeviceEvent& event) {
  pinned_.ReleaseAfter(bench_, event);
  index_on_host_ = nullptr;
}

}  // namespace dad
