// Device memory for one step: typed pieces that go back together.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "exchange/device/bench.h"

namespace dad {

// The first failure sticks; pieces are null from then on. Ask status() before using them.
class DeviceArena {
 public:
  // A piece of `count` values, not initialised.
  template <typename U>
  U* Take(DeviceBench& bench, int64_t count) {
    if (!status_.ok() || count == 0) return nullptr;
    Result<DeviceBlock> block = bench.Take(static_cast<size_t>(count) * sizeof(U));
    if (!block.ok()) {
      status_ = block.status();
      return nullptr;
    }
    blocks_.push_back(std::move(block).value());
    return reinterpret_cast<U*>(blocks_.back().get());
  }
  const Status& status() const { return status_; }
  // What was put on the stream may still use them: whoever gets them comes after it.
  void Release() { *this = {}; }

 private:
  std::vector<DeviceBlock> blocks_;
  Status status_;
};

}  // namespace dad
