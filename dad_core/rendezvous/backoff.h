// Growing waits between two looks at a store that cannot wake us.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace dad {

class Backoff {
 public:
  using Clock = std::chrono::steady_clock;

  Backoff(std::chrono::milliseconds longest, Clock::time_point deadline)
      : longest_(longest), deadline_(deadline) {}

  // False, at once, when the deadline has passed.
  bool Wait() {
    const auto now = Clock::now();
    if (now >= deadline_) return false;
    std::this_thread::sleep_until(std::min(now + next_, deadline_));
    next_ = std::min<Clock::duration>(next_ * 3 / 2, longest_);
    return true;
  }

 private:
  Clock::duration longest_;
  Clock::time_point deadline_;
  Clock::duration next_ = std::chrono::milliseconds(1);
};

}  // namespace dad
