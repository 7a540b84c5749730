// The payload of kState. It fits a control message: long texts are cut, and of long lists the first
// entries are kept.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "dad/snapshot.h"
#include "dad/status.h"

namespace dad {

inline constexpr size_t kMostListed = 8;  // requests, batches, and missing ranks

std::vector<std::byte> Encode(const Snapshot& snapshot);
Result<Snapshot> DecodeSnapshot(std::span<const std::byte> bytes);

}  // namespace dad
