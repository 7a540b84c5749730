#include "runtime/observe/lag_log.h"

#include <gtest/gtest.h>

namespace dad {
namespace {

TEST(LagLogTest, NamesTheRankThatHeldUpTheStepsForLongest) {
  LagLog log;
  EXPECT_EQ(log.Slowest().rank, -1);
  for (int step = 1; step <= 10; ++step) {
    log.Note(step, step % 2 == 0 ? 3 : 1, step % 2 == 0 ? 0.5 : 0.25);
  }
  const SlowestRank slowest = log.Slowest();
  EXPECT_EQ(slowest.rank, 3);
  EXPECT_EQ(slowest.steps, 10);
  EXPECT_EQ(slowest.last_in, 5);
  EXPECT_DOUBLE_EQ(slowest.seconds, 2.5);
  EXPECT_DOUBLE_EQ(slowest.worst_seconds, 0.5);
}

TEST(LagLogTest, OfTheTensorsOfAStepTheLatestCounts) {
  LagLog log;
  log.Note(1, 0, 0.1);
  log.Note(1, 2, 0.3);
  log.Note(1, 1, 0.2);
  EXPECT_EQ(log.Slowest().rank, 2);
  EXPECT_EQ(log.Slowest().steps, 1);
}

TEST(LagLogTest, ForgetsWhatIsAHundredStepsOld) {
  LagLog log;
  log.Note(1, 0, 100.0);
  log.Note(LagLog::kSteps, 1, 0.1);
  EXPECT_EQ(log.Slowest().rank, 0);
  log.Note(LagLog::kSteps + 1, 1, 0.1);
  EXPECT_EQ(log.Slowest().rank, 1);
  log.Note(1, 2, 50.0);  // a tensor that is not in every step has old numbers
  EXPECT_EQ(log.Slowest().rank, 1);
}

}  // namespace
}  // namespace dad
