// Times for the benchmarks of codecs.
#pragma once

#include <algorithm>
#include <ctime>
#include <functional>

namespace dad {

inline double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// CPU time, the best of several runs: what the machine can do, whatever else it is busy
// with.
inline double BestSeconds(const std::function<void()>& run) {
  double best = 1e9, total = 0;
  for (int i = 0; i < 40 && (i < 5 || total < 1.0); ++i) {
    const double begin = ThreadSeconds();
    run();
    const double seconds = ThreadSeconds() - begin;
    best = std::min(best, seconds);
    total += seconds;
  }
  return best;
}

}  // namespace dad
