// What ranks say of each other while the threads of the program are stuck.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "dad/program.h"
#include "engine_fixture.h"

namespace dad {
namespace {

using std::chrono::seconds;

// The program of this process; there is one for all engines, and it stays.
std::atomic<bool> g_is_stuck{false};

void StartProgram() {
  static const bool started = [] {
    std::thread([] {
      for (;;) {
        AwaitProgramQuestion();
        if (g_is_stuck) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          continue;
        }
        TellProgramPosition({"train.py:31 in load", "train.py:1\ntrain.py:31 in load"});
      }
    }).detach();
    while (!HasProgramReader()) std::this_thread::yield();
    return true;
  }();
  (void)started;
}

std::vector<Snapshot> Inspect(Engine& engine) {
  std::promise<std::vector<Snapshot>> promise;
  engine.Inspect([&](std::vector<Snapshot> all) { promise.set_value(std::move(all)); });
  return promise.get_future().get();
}

TEST(EngineInspectTest, EveryRankTellsWhatItHasOpenAndWhereItIs) {
  StartProgram();
  Job job(3);
  Values v({1}), warm0({1}), warm1({1}), warm2({1});
  Values* warm[] = {&warm0, &warm1, &warm2};
  job.Run([&](int rank) {
    EXPECT_TRUE(job[rank].Submit(warm[rank]->AllReduce("warm"))->Wait(seconds(20)).ok());
  });
  const auto open = job[0].Submit(v.AllReduce("late"));
  // Rank 0's announcement may still be on its way to the others, or their answers to rank 0.
  std::vector<Snapshot> all;
  const auto is_known = [&all] {
    return all.size() == 3 && !all[1].missing.empty() && all[0].requests.size() == 1 &&
           !all[0].requests[0].waits_for.empty();
  };
  for (int i = 0; i < 500 && !is_known(); ++i) {
    all = Inspect(job[2]);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].rank, 0);
  EXPECT_EQ(all[0].last_submitted, "allreduce \"late\"");
  EXPECT_EQ(all[0].num_requests, 1);
  ASSERT_EQ(all[0].requests.size(), 1u);
  EXPECT_EQ(all[0].requests[0].what, "allreduce \"late\"");
  EXPECT_EQ(all[0].requests[0].waits_for, (std::vector<int>{1, 2}));
  EXPECT_EQ(all[1].last_submitted, "allreduce \"warm\"");
  EXPECT_GE(all[1].since_result, 0.0);
  EXPECT_GE(all[1].since_cycle, 0.0);
  ASSERT_EQ(all[1].missing.size(), 1u);
  EXPECT_EQ(all[1].missing[0].name, "late");
  EXPECT_EQ(all[1].missing[0].ranks, std::vector<int>{0});
  for (const Snapshot& one : all) EXPECT_EQ(one.where, "train.py:31 in load");
}

TEST(EngineInspectTest, AProgramThatDoesNotAnswerIsSaidToHoldItsLock) {
  StartProgram();
  Job job(2);
  g_is_stuck = true;
  const std::vector<Snapshot> all = Inspect(job[0]);
  g_is_stuck = false;
  ASSERT_EQ(all.size(), 2u);
  for (const Snapshot& one : all) {
    EXPECT_NE(one.where.find("may hold Python's lock"), std::string::npos) << one.where;
  }
}

TEST(EngineInspectTest, ARankThatHasLeftDoesNotAnswer) {
  StartProgram();
  Job job(3);
  job.Leave(1);
  std::vector<Snapshot> all;
  for (int i = 0; i < 100 && all.size() != 2; ++i) all = Inspect(job[0]);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[1].rank, 2);
}

TEST(EngineInspectTest, AQuestionIsDroppedWithTheEngine) {
  auto promise = std::make_shared<std::promise<void>>();
  std::future<void> future = promise->get_future();
  g_is_stuck = true;
  StartProgram();
  {
    Job job(2);
    job[0].Inspect([promise](const std::vector<Snapshot>&) {});
    promise.reset();
  }
  g_is_stuck = false;
  EXPECT_EQ(future.wait_for(seconds(20)), std::future_status::ready);
}

TEST(EngineInspectTest, StatisticsNameTheRankThatIsLateInEveryStep) {
  Job job(3);
  job.Run([&](int rank) {
    for (int step = 0; step < 12; ++step) {
      if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      Values v({1});
      ASSERT_TRUE(job[rank].Submit(v.AllReduce("gradient"))->Wait(seconds(20)).ok());
    }
  });
  for (int rank = 0; rank < 3; ++rank) {
    const SlowestRank slowest = job[rank].GetStats().slowest;
    EXPECT_EQ(slowest.rank, 2) << "as rank " << rank << " saw it";
    EXPECT_GE(slowest.last_in, 6);
    EXPECT_GE(slowest.seconds / static_cast<double>(slowest.last_in), 0.01);
  }
}

}  // namespace
}  // namespace dad
