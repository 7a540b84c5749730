// Which rank was the last to have its tensors ready in each of the last steps, and by how much.
// Worker only.
#pragma once

#include <array>
#include <cstdint>

#include "dad/engine.h"

namespace dad {

class LagLog {
 public:
  static constexpr int64_t kSteps = 100;

  // In this step (from 1 on) of a tensor, `rank` was ready this much later than the first. The
  // largest value of a step counts.
  void Note(int64_t step, int rank, double seconds);
  // The rank that has delayed the last kSteps steps for the longest time in total.
  SlowestRank Slowest() const;

 private:
  struct Entry {
    int64_t step = 0;
    int rank = -1;
    double seconds = 0.0;
  };
  std::array<Entry, kSteps> entries_;  // by step modulo kSteps
  int64_t newest_ = 0;
};

}  // namespace dad
