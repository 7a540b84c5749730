// This rank's gradient of a layer, term by term, into a side of low rank (low_rank_side.h): rows,
// what came formed, and indexed rows, whose indices the host has to look at before.
#pragma once

#include <cstdint>
#include <vector>

#include "dad/contribution.h"
#include "exchange/device/arena.h"
#include "exchange/device/low_rank_side.h"
#include "exchange/device/transfer.h"

namespace dad {

class LayerTerms {
 public:
  explicit LayerTerms(DeviceBench& bench) : bench_(bench) {}

  // A step begins: `m` rows has the layer.
  void Begin(const LayerInput& layer, int64_t m, float scale);

  // The layer's rows, where they lie or converted in `arena`.
  Result<std::vector<DeviceRows>> Rows(DeviceArena& arena);
  // Rows and what came formed. Indices, if there are any, are put on their way to the host.
  Status Add(DeviceLowRankSide& side, DeviceArena& arena);
  // Whether indices are to be looked at; when they are there AddIndexed does so. kUnavailable,
  // saying why, if one is outside of the tensor.
  bool has_indices() const { return index_on_host_ != nullptr; }
  Status AddIndexed(DeviceLowRankSide& side, DeviceArena& arena);
  void End(const DeviceEvent& event);

 private:
  DeviceBench& bench_;
  const LayerInput* layer_ = nullptr;
  int64_t m_ = 0;
  float scale_ = 1;
  PinnedKeep pinned_;
  const std::byte* index_on_host_ = nullptr;
};

}  // namespace dad
