#include "runtime/lane/fuser.h"

#include <algorithm>

namespace dad {
namespace {

// How many slices a tensor is cut into; 1: it is not.
int64_t NumSlices(const FuseItem& item, int64_t fusion_bytes) {
  if (!item.elementwise || fusion_bytes < 8 || item.bytes() <= fusion_bytes / 8) return 1;
  const int64_t slice_bytes = std::clamp(item.bytes() / 8, fusion_bytes / 8, fusion_bytes);
  return (item.bytes() + slice_bytes - 1) / slice_bytes;
}

void AddTo(FusedBatch& batch, const FuseItem& item) {
  batch.parts.push_back({item.request, item.tensor, {0, item.elements}});
  batch.bytes += item.bytes();
}

// A request that does not fit into one batch.
void FuseLarge(std::span<const FuseItem> items, int64_t fusion_bytes,
               std::vector<FusedBatch>& batches) {
  bool open = false;
  for (const FuseItem& item : items) {
    if (const int64_t slices = NumSlices(item, fusion_bytes); slices > 1) {
      for (int64_t i = 0; i < slices; ++i) {
        const int64_t begin = item.elements * i / slices;
        const int64_t count = item.elements * (i + 1) / slices - begin;
        batches.push_back(
            {{{item.request, item.tensor, {begin, count}}}, count * item.element_bytes});
      }
      open = false;
      continue;
    }
    if (!open || batches.back().bytes + item.bytes() > fusion_bytes) batches.emplace_back();
    AddTo(batches.back(), item);
    open = true;
  }
}

}  // namespace

std::vector<FusedBatch> Fuse(std::span<const FuseItem> items, int64_t fusion_bytes) {
  std::vector<FusedBatch> batches;
  bool open = false;
  uint64_t key = 0;
  while (!items.empty()) {
    size_t count = 0;
    int64_t bytes = 0;
    bool cut = false;
    while (count < items.size() && items[count].request == items[0].request) {
      cut = cut || NumSlices(items[count], fusion_bytes) > 1;
      bytes += items[count++].bytes();
    }
    const std::span<const FuseItem> request = items.first(count);
    items = items.subspan(count);
    if (cut || bytes > fusion_bytes) {
      FuseLarge(request, fusion_bytes, batches);
      open = false;
      continue;
    }
    const bool fits = open && key == request[0].key && fusion_bytes > 0 &&
                      batches.back().bytes + bytes <= fusion_bytes;
    if (!fits) batches.emplace_back();
    for (const FuseItem& item : request) AddTo(batches.back(), item);
    open = true;
    key = request[0].key;
  }
  return batches;
}

}  // namespace dad
