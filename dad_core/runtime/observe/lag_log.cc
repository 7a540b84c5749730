#include "runtime/observe/lag_log.h"

#include <algorithm>
#include <map>

namespace dad {

void LagLog::Note(int64_t step, int rank, double seconds) {
  Entry& entry = entries_[static_cast<size_t>(step % kSteps)];
  if (step < entry.step || (step == entry.step && seconds <= entry.seconds)) return;
  entry = {step, rank, seconds};
  newest_ = std::max(newest_, step);
}

SlowestRank LagLog::Slowest() const {
  std::map<int, SlowestRank> by_rank;
  int64_t steps = 0;
  for (const Entry& entry : entries_) {
    if (entry.rank < 0 || entry.step <= newest_ - kSteps) continue;
    ++steps;
    SlowestRank& one = by_rank[entry.rank];
    one.rank = entry.rank;
    ++one.last_in;
    one.seconds += entry.seconds;
    one.worst_seconds = std::max(one.worst_seconds, entry.seconds);
  }
  SlowestRank slowest;
  for (const auto& [rank, one] : by_rank) {
    if (one.seconds > slowest.seconds) slowest = one;
  }
  slowest.steps = steps;
  return slowest;
}

}  // namespace dad
