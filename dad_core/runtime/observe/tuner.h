// Finds the fusion size with the shortest step by trying a few, one after the other, for some steps
// each. Runs on the first rank of the global process set; the others learn the result in the next
// negotiation. Takes times, reads no clock.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

namespace dad {

class Tuner {
 public:
  using Clock = std::chrono::steady_clock;

  // Tries the given size first, then the table in the .cc. Writes notes to `log_path` as CSV, if it
  // is not empty.
  Tuner(int64_t fusion_bytes, const std::string& log_path);
  ~Tuner();
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  // A step has begun. Returns the size to use from now on, if that is to change.
  std::optional<int64_t> StepBegins(Clock::time_point now);

  bool done() const { return current_ >= candidates_.size(); }

  static constexpr int kWarmUpSteps = 3;
  static constexpr int kTimedSteps = 10;

 private:
  std::optional<int64_t> Next(double seconds_per_step);

  std::vector<int64_t> candidates_;
  std::vector<double> seconds_;
  size_t current_ = 0;
  int steps_ = 0;
  Clock::time_point timed_from_;
  std::FILE* log_ = nullptr;
};

}  // namespace dad
