#include "runtime/observe/stall_watch.h"

#include <gtest/gtest.h>

#include "lane_fixture.h"

namespace dad {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class StallWatchTest : public testing::Test {
 protected:
  static Options WarnAfter(double warning, double shutdown = 0) {
    Options options;
    options.stall_warning_seconds = warning;
    options.stall_shutdown_seconds = shutdown;
    return options;
  }
  std::shared_ptr<RequestState> Submit(int rank, size_t elements = 1) {
    Values& values = *values_.emplace_back(std::make_unique<Values>(std::vector<float>(elements)));
    auto request = cluster_[rank].Submit(values.AllReduce("late"));
    cluster_.Settle();
    return request;
  }
  // What the watch of rank 0 says.
  std::optional<std::string> Check(StallWatch& watch) {
    return watch.Check(cluster_[0].lane(), cluster_.now());
  }

  FakeCluster cluster_{3};
  std::vector<std::unique_ptr<Values>> values_;
};

TEST_F(StallWatchTest, WarnsOnceOfARequestThatWaitsForOthersTooLong) {
  StallWatch watch(WarnAfter(60));
  const auto request = Submit(0);
  Submit(2);
  cluster_.Advance(seconds(59));
  EXPECT_EQ(Check(watch), std::nullopt);
  EXPECT_FALSE(request->warned);
  cluster_.Advance(seconds(1));
  testing::internal::CaptureStderr();
  EXPECT_EQ(Check(watch), std::nullopt) << "nobody gives up";
  EXPECT_NE(testing::internal::GetCapturedStderr().find(
                "allreduce \"late\" has waited for 60 s for rank(s) 1"),
            std::string::npos);
  EXPECT_TRUE(request->warned);
  cluster_.Advance(seconds(60));
  testing::internal::CaptureStderr();
  EXPECT_EQ(Check(watch), std::nullopt);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(StallWatchTest, GivesUpWithTheNamesOfTensorAndRanks) {
  StallWatch watch(WarnAfter(1000, 90));
  Submit(0);
  cluster_.Advance(milliseconds(89'999));
  EXPECT_EQ(Check(watch), std::nullopt);
  cluster_.Advance(milliseconds(1));
  EXPECT_EQ(Check(watch), "allreduce \"late\" was not submitted by rank(s) 1, 2 within 90 s");
}

TEST_F(StallWatchTest, ABatchThatSomeHaveNotSentCountsAsWell) {
  for (int step = 0; step < 4; ++step) {
    for (int rank = 0; rank < 3; ++rank) Submit(rank);
  }
  Submit(0);  // by the schedule: its data is its readiness
  StallWatch watch(WarnAfter(1000, 10));
  cluster_.Advance(seconds(10));
  EXPECT_EQ(Check(watch), "allreduce \"late\" was not submitted by rank(s) 1, 2 within 10 s");
}

TEST_F(StallWatchTest, ARankThatHasNotSubmittedItHasNothingToSay) {
  Submit(1);
  StallWatch watch(WarnAfter(1, 1));
  cluster_.Advance(seconds(100));
  EXPECT_EQ(Check(watch), std::nullopt);
}

TEST_F(StallWatchTest, LooksFourTimesWithinTheShortestOfItsTimes) {
  EXPECT_EQ(StallWatch(WarnAfter(8)).interval(), milliseconds(2000));
  EXPECT_EQ(StallWatch(WarnAfter(8, 1)).interval(), milliseconds(250));
  EXPECT_EQ(StallWatch(WarnAfter(1000)).interval(), milliseconds(5000));
  EXPECT_EQ(StallWatch(WarnAfter(0.001)).interval(), milliseconds(20));
  Options off;
  off.stall_check = false;
  EXPECT_FALSE(StallWatch(off).enabled());
}

}  // namespace
}  // namespace dad
