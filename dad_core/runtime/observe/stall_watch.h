// Names the tensors that some ranks have submitted and others have not. Worker only.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "dad/options.h"
#include "runtime/lane/lane.h"

namespace dad {

class StallWatch {
 public:
  using Clock = std::chrono::steady_clock;

  explicit StallWatch(const Options& options);

  bool enabled() const { return enabled_; }
  std::chrono::milliseconds interval() const { return interval_; }

  // Warns once per request; the reason to give up when one has waited too long.
  std::optional<std::string> Check(const Lane& lane, Clock::time_point now);

 private:
  const bool enabled_;
  const std::chrono::duration<double> warn_after_;
  const std::chrono::duration<double> give_up_after_;  // 0: never
  const std::chrono::milliseconds interval_;
};

}  // namespace dad
