#include "runtime/observe/tuner.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "util/log.h"

namespace dad {

Tuner::Tuner(int64_t fusion_bytes, const std::string& log_path) : candidates_{fusion_bytes} {
  for (int64_t size = 256 << 10; size <= 16 << 20; size *= 2) {
    if (size != fusion_bytes) candidates_.push_back(size);
  }
  if (log_path.empty()) return;
  log_ = std::fopen(log_path.c_str(), "w");
  if (log_ == nullptr) {
    DAD_LOG(Warning) << "autotune log " << log_path << ": " << std::strerror(errno);
  } else {
    std::fputs("fusion_bytes,seconds_per_step\n", log_);
  }
}

Tuner::~Tuner() {
  if (log_ != nullptr) std::fclose(log_);
}

std::optional<int64_t> Tuner::StepBegins(Clock::time_point now) {
  if (done()) return std::nullopt;
  ++steps_;
  if (steps_ == kWarmUpSteps + 1) timed_from_ = now;
  if (steps_ <= kWarmUpSteps + kTimedSteps) return std::nullopt;
  return Next(std::chrono::duration<double>(now - timed_from_).count() / kTimedSteps);
}

std::optional<int64_t> Tuner::Next(double seconds_per_step) {
  seconds_.push_back(seconds_per_step);
  if (log_ != nullptr) {
    std::fprintf(log_, "%lld,%.6f\n", static_cast<long long>(candidates_[current_]),
                 seconds_per_step);
    std::fflush(log_);
  }
  steps_ = 0;
  if (++current_ < candidates_.size()) return candidates_[current_];
  const auto best = std::min_element(seconds_.begin(), seconds_.end()) - seconds_.begin();
  DAD_LOG(Info) << "autotune: fusion_bytes " << candidates_[static_cast<size_t>(best)] << ", "
                << seconds_[static_cast<size_t>(best)] * 1e3 << " ms per step";
  return candidates_[static_cast<size_t>(best)];
}

}  // namespace dad
