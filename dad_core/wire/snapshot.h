// The payload of kState. It fits a control message: what is long is cut, and of many things the
// first are listed.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "dad/snapshot.h"
#include "dad/status.h"

namespace dad {

inline constexpr size_t kMostListed = 8;  // of requests, of batches, and of missing ones

std::vector<std::byte> Encode(const Snapshot& snapshot);
Result<Snapshot> DecodeSnapshot(std::span<const std::byte> bytes);

}  // namespace dad
