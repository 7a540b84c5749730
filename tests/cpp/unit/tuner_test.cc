#include "runtime/observe/tuner.h"

#include <gtest/gtest.h>

#include <cmath>

namespace dad {
namespace {

TEST(TunerTest, SettlesOnTheSizeWithTheShortestStep) {
  Tuner tuner(1 << 20, "");
  int64_t size = 1 << 20;
  Tuner::Clock::time_point now;
  for (int step = 0; step < 1000 && !tuner.done(); ++step) {
    // 4 MB is best here.
    const double ms = 10 + std::abs(std::log2(static_cast<double>(size)) - 22);
    now += std::chrono::microseconds(static_cast<int64_t>(ms * 1000));
    if (auto next = tuner.StepBegins(now)) size = *next;
  }
  EXPECT_TRUE(tuner.done());
  EXPECT_EQ(size, 4 << 20);
  EXPECT_FALSE(tuner.StepBegins(now).has_value());
}

}  // namespace
}  // namespace dad
