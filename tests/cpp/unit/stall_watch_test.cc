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

  StallWatch Watch(double warning, double shutdown = 0) {
    return StallWatch(0, WarnAfter(warning, shutdown),
                      [this](const std::vector<int>& ranks, Inquiry::Done done) {
                        asked_.push_back(ranks);
                        if (answers_at_once_) return done(answers_);
                        pending_ = std::move(done);
                      });
  }
  static milliseconds Interval(double warning, double shutdown = 0) {
    return StallWatch(0, WarnAfter(warning, shutdown), nullptr).interval();
  }
  std::string CheckAndListen(StallWatch& watch) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(Check(watch), std::nullopt) << "nobody gives up";
    return testing::internal::GetCapturedStderr();
  }
  static Snapshot Answer(int rank, const std::string& last, const std::string& where) {
    Snapshot answer;
    answer.rank = rank;
    answer.last_submitted = last;
    answer.since_submit = 61;
    answer.where = where;
    return answer;
  }

  FakeCluster cluster_{3};
  std::vector<Snapshot> answers_;
  bool answers_at_once_ = true;
  Inquiry::Done pending_;
  std::vector<std::vector<int>> asked_;
  std::vector<std::unique_ptr<Values>> values_;
};

TEST_F(StallWatchTest, WarnsOnceOfARequestThatWaitsForOthersTooLong) {
  StallWatch watch = Watch(60);
  answers_ = {Answer(0, "allreduce \"late\"", "train.py:30"),
              Answer(1, "allreduce \"early\"", "train.py:31 in load")};
  const auto request = Submit(0);
  Submit(2);
  cluster_.Advance(seconds(59));
  EXPECT_EQ(CheckAndListen(watch), "");
  EXPECT_FALSE(request->warned);
  cluster_.Advance(seconds(1));
  const std::string said = CheckAndListen(watch);
  EXPECT_EQ(asked_, (std::vector<std::vector<int>>{{1, 0}}));
  for (const char* part : {"allreduce \"late\" has waited for 60 s for rank 1\n",
                           "rank 1: last submitted allreduce \"early\" 61 s ago; main thread: "
                           "train.py:31 in load\n",
                           "this rank, main thread: train.py:30\n", "waits on, without end"}) {
    EXPECT_NE(said.find(part), std::string::npos) << said;
  }
  EXPECT_TRUE(request->warned);
  cluster_.Advance(seconds(60));
  EXPECT_EQ(CheckAndListen(watch), "");
}

TEST_F(StallWatchTest, RequestsThatWaitForTheSameRanksShareAWarning) {
  StallWatch watch = Watch(10, 25);
  Values a({1}), b({1}), c({1});
  for (Values* values : {&a, &b, &c}) {
    cluster_[0].Submit(values->AllReduce("t" + std::to_string(values == &a   ? 0
                                                              : values == &b ? 1
                                                                             : 2)));
  }
  cluster_.Settle();
  cluster_.Advance(seconds(10));
  const std::string said = CheckAndListen(watch);
  EXPECT_NE(said.find(" and 2 more have waited for 10 s for ranks 1, 2\n"), std::string::npos);
  EXPECT_NE(said.find("ranks 1, 2: does not answer"), std::string::npos) << said;
  EXPECT_NE(said.find("The job ends in 15 s"), std::string::npos) << said;
}

TEST_F(StallWatchTest, OfTheRanksThatWaitTheLowestWarns) {
  Submit(0);
  Submit(1);
  StallWatch watch(1, WarnAfter(1), [this](const std::vector<int>& ranks, Inquiry::Done) {
    asked_.push_back(ranks);
  });
  cluster_.Advance(seconds(10));
  EXPECT_EQ(watch.Check(cluster_[1].lane(), cluster_.now()), std::nullopt);
  EXPECT_TRUE(asked_.empty());
}

TEST_F(StallWatchTest, RanksThatWaitForEachOtherAreToldSo) {
  StallWatch watch = Watch(60);
  answers_ = {Answer(1, "broadcast \"b\"", "train.py:31")};
  answers_[0].requests = {{"broadcast \"b\"", 60, {0}, -1, 0}};
  Submit(0);
  Submit(2);
  cluster_.Advance(seconds(60));
  const std::string said = CheckAndListen(watch);
  EXPECT_NE(said.find("waits in broadcast \"b\" for rank 0"), std::string::npos) << said;
  EXPECT_NE(said.find("They wait for each other"), std::string::npos) << said;
}

TEST_F(StallWatchTest, GivesUpWithTheNamesOfTensorAndRanksAndWhatTheyDo) {
  StallWatch watch = Watch(1000, 90);
  answers_at_once_ = false;
  Submit(0);
  cluster_.Advance(milliseconds(89'999));
  EXPECT_EQ(Check(watch), std::nullopt);
  cluster_.Advance(milliseconds(1));
  EXPECT_EQ(Check(watch), std::nullopt) << "it asks first";
  pending_({Answer(1, "", "train.py:31"), Answer(2, "", "train.py:31")});
  const auto reason = Check(watch);
  ASSERT_TRUE(reason.has_value());
  EXPECT_TRUE(reason->starts_with(
      "allreduce \"late\" was not submitted by ranks 1, 2 within 90 s "
      "(DAD_STALL_SHUTDOWN_TIME_SECONDS). ranks 1, 2: has submitted nothing yet; main thread: "
      "train.py:31. "))
      << *reason;
}

TEST_F(StallWatchTest, ABatchThatSomeHaveNotSentCountsAsWell) {
  for (int step = 0; step < 4; ++step) {
    for (int rank = 0; rank < 3; ++rank) Submit(rank);
  }
  Submit(0);  // by the schedule: its data is its readiness
  StallWatch watch = Watch(1000, 10);
  cluster_.Advance(seconds(10));
  const auto reason = Check(watch);
  ASSERT_TRUE(reason.has_value());
  EXPECT_TRUE(
      reason->starts_with("allreduce \"late\" was not submitted by ranks 1, 2 within 10 s"));
}

TEST_F(StallWatchTest, ARankThatHasNotSubmittedItHasNothingToSay) {
  Submit(1);
  StallWatch watch = Watch(1, 1);
  cluster_.Advance(seconds(100));
  EXPECT_EQ(Check(watch), std::nullopt);
}

TEST_F(StallWatchTest, LooksFourTimesWithinTheShortestOfItsTimes) {
  EXPECT_EQ(Interval(8), milliseconds(2000));
  EXPECT_EQ(Interval(8, 1), milliseconds(250));
  EXPECT_EQ(Interval(1000), milliseconds(5000));
  EXPECT_EQ(Interval(0.001), milliseconds(20));
  Options off;
  off.stall_check = false;
  EXPECT_FALSE(StallWatch(0, off, nullptr).enabled());
}

}  // namespace
}  // namespace dad
