// Numbers for collectives under way, as Horovod's users know them. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "dad/status.h"
#include "torch_ops/ops/collective.h"

namespace dad_torch {

int64_t KeepHandle(std::unique_ptr<Pending> pending, bool grouped);
dad::Result<bool> PollHandle(int64_t handle);

struct TakenHandle {
  std::unique_ptr<Pending> pending;
  bool grouped = false;  // the caller gave a list and gets one back
};
// Ends the handle: it cannot be used again, unless it is given back.
dad::Result<TakenHandle> TakeHandle(int64_t handle);
void GiveBackHandle(int64_t handle, TakenHandle taken);

}  // namespace dad_torch
