// A lane as a state machine: how its members agree, recall, withdraw, join and part.
#include "runtime/lane/lane.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>

#include "lane_fixture.h"

namespace dad {
namespace {

using std::chrono::milliseconds;
using RequestPtr = std::shared_ptr<RequestState>;

// Ranks that sum tensors; each keeps the memory of all of them.
class Ranks : public FakeCluster {
 public:
  using FakeCluster::FakeCluster;

  RequestPtr Sum(int rank, const std::string& name, float value = 1, size_t elements = 4,
                 uint64_t step = 0) {
    Values& values = values_.emplace_back(std::vector<float>(elements, value));
    Request request = values.AllReduce(name);
    request.step = step;
    RequestPtr state = (*this)[rank].Submit(std::move(request));
    all_.push_back({rank, state, &values});
    return state;
  }
  std::vector<RequestPtr> SumOnAll(const std::string& name, size_t elements = 4) {
    std::vector<RequestPtr> requests;
    for (int rank = 0; rank < size(); ++rank) requests.push_back(Sum(rank, name, 1, elements));
    return requests;
  }
  // Steps with these tensors until they go by a schedule.
  void Learn(const std::vector<std::string>& names, size_t elements = 4) {
    for (int step = 0; step < 4; ++step) {
      for (const std::string& name : names) SumOnAll(name, elements);
      Settle();
    }
    const int64_t negotiations = (*this)[0].lane().num_negotiations();
    for (const std::string& name : names) SumOnAll(name, elements);
    Settle();
    EXPECT_EQ((*this)[0].lane().num_negotiations(), negotiations) << "no schedule yet";
    ExpectAllDone();
    all_.clear();
  }
  float ValueOf(const RequestPtr& request) const {
    for (const Submitted& submitted : all_) {
      if (submitted.request == request) return submitted.values->data.back();
    }
    return -1;
  }
  void ExpectAllDone() const {
    for (const auto& [rank, request, values] : all_) {
      EXPECT_TRUE(StatusOf(*request).ok())
          << request->meta.name << ": " << StatusOf(*request).ToString();
    }
  }
  struct Submitted {
    int rank;
    RequestPtr request;
    const Values* values;
  };
  const std::vector<Submitted>& all() const { return all_; }

 private:
  std::deque<Values> values_;
  std::vector<Submitted> all_;
};

TEST(LaneTest, TensorsThatComeAgainNeedNoNegotiation) {
  Ranks ranks(3);
  ranks.Learn({"a", "b"});
  const int64_t predicted = ranks[1].lane().num_predicted();
  ranks.SumOnAll("b");
  const auto a = ranks.SumOnAll("a");
  ranks.Settle();
  ranks.ExpectAllDone();
  EXPECT_EQ(ranks.ValueOf(a[2]), 3.0f);
  EXPECT_EQ(ranks[1].lane().num_predicted(), predicted + 1) << "a and b share a batch";
}

TEST(LaneTest, AScheduleIsBuiltWhereAStepBegins) {
  Ranks ranks(2);
  const auto step = [&] {
    ranks.SumOnAll("a");
    ranks.Settle();  // a is negotiated before the others come, also the second time
    ranks.SumOnAll("b");
    ranks.SumOnAll("c");
    ranks.Settle();
  };
  step();
  step();
  const int64_t negotiations = ranks[0].lane().num_negotiations();
  const int64_t predicted = ranks[0].lane().num_predicted();
  step();
  ranks.ExpectAllDone();
  EXPECT_EQ(ranks[0].lane().num_negotiations(), negotiations);
  EXPECT_EQ(ranks[0].lane().num_predicted(), predicted + 1);
}

TEST(LaneTest, ReadinessIsGatheredForTheCycleTime) {
  Options options;
  options.cycle_time_ms = 5;
  Ranks ranks(2, options);
  ranks.SumOnAll("a");
  ranks.Advance(milliseconds(4));
  ranks.SumOnAll("b");
  ranks.Settle();
  EXPECT_EQ(ranks[0].lane().num_negotiations(), 0);
  ASSERT_TRUE(ranks.AdvanceToDeadline());
  ranks.Settle();
  EXPECT_EQ(ranks[0].lane().num_negotiations(), 1) << "one for both";
  ranks.ExpectAllDone();
}

TEST(LaneTest, AUserWhoWaitsRecallsABatchThatIsIncomplete) {
  Ranks ranks(3);
  ranks.Learn({"a", "b"});
  const auto a = ranks.SumOnAll("a");
  ranks.Settle();
  EXPECT_FALSE(a[0]->finished()) << "its batch waits for b";
  ranks[1].Wait(a[1]);
  ranks.Settle();
  ranks.ExpectAllDone();
}

TEST(LaneTest, AUserWhoPollsIsGivenASecond) {
  Ranks ranks(2);
  ranks.Learn({"a", "b"});
  const auto a = ranks.SumOnAll("a");
  ranks[0].Poll(a[0]);
  ranks.Settle();
  ranks.Advance(milliseconds(999));
  ranks.Settle();
  EXPECT_FALSE(a[0]->finished());
  ranks.Advance(milliseconds(1));
  ranks.Settle();
  ranks.ExpectAllDone();
}

// Rank 0 has both tensors of a batch and has sent it; rank 1 has one of them and waits.
TEST(LaneTest, ABatchThatOnlySomeHaveSentIsTakenBackAndNegotiated) {
  Ranks ranks(2);
  ranks.Learn({"a", "b"});
  ranks.Sum(0, "a", 10);
  const RequestPtr b = ranks.Sum(0, "b", 20);
  const RequestPtr a = ranks.Sum(1, "a", 1);
  ranks[1].Wait(a);
  ranks.Settle();
  EXPECT_TRUE(a->finished());
  EXPECT_EQ(ranks.ValueOf(a), 11.0f);
  EXPECT_FALSE(b->finished());
  ranks.Sum(1, "b", 2);
  ranks.Settle();
  ranks.ExpectAllDone();
  EXPECT_EQ(ranks.ValueOf(b), 22.0f);
  EXPECT_EQ(ranks[0].lane().num_unread() + ranks[1].lane().num_unread(), 0u);
}

TEST(LaneTest, AnotherShapeThanTheScheduleHasFailsOnAllRanks) {
  Ranks ranks(3);
  ranks.Learn({"a"});
  ranks.Sum(0, "a");
  ranks.Sum(1, "a", 1, 5);
  ranks.Sum(2, "a");
  ranks.Settle();
  for (const auto& [rank, request, values] : ranks.all()) {
    EXPECT_EQ(StatusOf(*request).message(),
              "ranks disagree on \"a\": shape [4] on rank 0, [5] on rank 1");
  }
}

// Rank 0 has a tensor of the kind that rank 1 has, but ranks disagreed before it said so.
TEST(LaneTest, WhatFailedBeforeItWasAnnouncedIsNotAnnounced) {
  Ranks ranks(2);
  std::deque<Values> kept;
  const auto gather = [&](int rank) {
    return ranks[rank].Submit(kept.emplace_back(std::vector<float>{1.0f * rank}).AllGather("x"));
  };
  const RequestPtr sum = ranks.Sum(0, "x");
  const RequestPtr rows = gather(1);
  ranks[0].Run();
  ranks[1].Run();
  const RequestPtr too = gather(0);
  ranks[0].Run();
  ranks.Settle();
  for (const RequestPtr& each : {sum, rows, too}) {
    EXPECT_EQ(StatusOf(*each).code(), StatusCode::kFailedPrecondition);
  }
  const RequestPtr again = gather(1);
  ranks.Settle();
  EXPECT_FALSE(again->finished());
  gather(0);
  ranks.Settle();
  EXPECT_TRUE(StatusOf(*again).ok());
  EXPECT_EQ(kept[2].gathered, (std::vector<float>{0, 1}));
}

TEST(LaneTest, AStepThatIsGivenUpIsWithdrawnAndMayBeTriedAgain) {
  Ranks ranks(2);
  const RequestPtr first = ranks.Sum(0, "a", 10, 4, /*step=*/1);
  ranks.Settle();
  ranks[0].GiveUp(1, Status::InvalidArgument("out of memory"));
  ranks.Settle();
  EXPECT_EQ(StatusOf(*first).message(), "out of memory");
  const RequestPtr late = ranks.Sum(0, "b", 1, 4, /*step=*/1);
  ranks.Settle();
  EXPECT_EQ(StatusOf(*late).message(), "out of memory") << "it is of the same step";
  const RequestPtr again = ranks.Sum(0, "a", 20, 4, /*step=*/2);
  const RequestPtr other = ranks.Sum(1, "a", 1, 4, /*step=*/1);
  ranks.Settle();
  EXPECT_EQ(ranks.ValueOf(again), 21.0f);
  EXPECT_EQ(ranks.ValueOf(other), 21.0f);
}

TEST(LaneTest, AStepThatIsGivenUpIsTakenOutOfTheSchedule) {
  Ranks ranks(2);
  ranks.Learn({"a"});
  const RequestPtr first = ranks.Sum(0, "a", 10, 4, /*step=*/7);
  ranks.Settle();
  ranks[0].GiveUp(7, Status::InvalidArgument("cancelled"));
  ranks.Settle();
  EXPECT_EQ(StatusOf(*first).message(), "cancelled");
  const RequestPtr again = ranks.Sum(0, "a", 20, 4, /*step=*/8);
  const RequestPtr other = ranks.Sum(1, "a", 1, 4, /*step=*/7);
  ranks.Settle();
  EXPECT_EQ(ranks.ValueOf(again), 21.0f);
  EXPECT_EQ(ranks.ValueOf(other), 21.0f);
}

TEST(LaneTest, JoinedRanksBringNothingUntilAllHaveJoined) {
  Ranks ranks(3);
  ranks.Learn({"a"});
  const RequestPtr early = ranks[2].Join();
  ranks.Settle();
  const RequestPtr a = ranks.Sum(0, "a");
  const RequestPtr b = ranks.Sum(1, "a");
  ranks.Settle();
  EXPECT_EQ(ranks.ValueOf(a), 2.0f);
  EXPECT_EQ(a->absent, std::vector<int>{2});
  EXPECT_FALSE(early->finished());
  ranks[1].Join();
  ranks.Settle();
  ranks[0].Join();
  ranks.Settle();
  EXPECT_TRUE(StatusOf(*early).ok());
  EXPECT_EQ(early->value(), 0) << "the last to join";
  ranks.Learn({"a"});
}

// The others ask for a recall because they have joined. It ends the join of all ranks; what rank 0
// had sent by the schedule has to be answered before that.
TEST(LaneTest, WhatWasSentByTheScheduleBeforeTheLastJoinIsAnswered) {
  Ranks ranks(3);
  ranks.Learn({"a"});
  const RequestPtr a = ranks.Sum(0, "a", 5);
  std::vector<RequestPtr> joins;
  for (int rank = 0; rank < 3; ++rank) joins.push_back(ranks[rank].Join());
  ranks.Settle();
  for (const RequestPtr& join : joins) EXPECT_TRUE(StatusOf(*join).ok());
  ASSERT_TRUE(a->finished());
  EXPECT_EQ(ranks.ValueOf(a), 5.0f);
}

// Rank 2 is not in the set, so the end of the join may be known before rank 1 speaks there.
TEST(LaneTest, WhatIsOpenInASmallerSetAtAJoinIsAnsweredBeforeItEnds) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    const auto choose = [&](size_t n) { return random() % n; };
    FakeCluster ranks(3, Options(), {{0, 1}});
    Values values(std::vector<float>(4, 5.0f));
    Request request = values.AllReduce("a");
    request.process_set = 1;
    const RequestPtr a = ranks[0].Submit(std::move(request));
    std::vector<RequestPtr> joins;
    for (int rank : {2, 1, 0}) joins.push_back(ranks[rank].Join());
    while (ranks.Step(choose) || ranks.AdvanceToDeadline()) {
      EXPECT_TRUE(!joins[0]->finished() || a->finished()) << "seed " << seed;
    }
    for (const RequestPtr& join : joins) ASSERT_TRUE(join->finished()) << "seed " << seed;
    ASSERT_TRUE(a->finished()) << "seed " << seed;
    EXPECT_EQ(values.data.back(), 5.0f);
  }
}

// Rank 0 has announced an allreduce when a schedule is built that has a broadcast of this name,
// which rank 1 then sends by the schedule.
TEST(LaneTest, AKindThatWaitsWhenAScheduleIsBuiltIsComparedWithTheScheduledOne) {
  Ranks ranks(2);
  std::deque<Values> kept;
  auto broadcast = [&](int rank) {
    return ranks[rank].Submit(kept.emplace_back(std::vector<float>(4, 1.0f)).Broadcast("x", 0));
  };
  for (int rank = 0; rank < 2; ++rank) broadcast(rank);
  ranks.Settle();
  // The second step of y lets the ranks build a schedule, in which the broadcast is.
  ranks.SumOnAll("y");
  ranks.Settle();
  const RequestPtr mine = ranks.Sum(0, "x");
  ranks.Settle();
  ranks.SumOnAll("y");
  ranks.Settle();
  ranks.SumOnAll("y");
  ranks.Settle();
  const RequestPtr other = broadcast(1);
  ranks[0].Wait(mine);
  ranks[1].Wait(other);
  ranks.Settle();
  ASSERT_TRUE(mine->finished() && other->finished());
  EXPECT_EQ(StatusOf(*mine).message(),
            "ranks disagree on \"x\": collective allreduce on rank 0, broadcast on rank 1");
  EXPECT_EQ(StatusOf(*other).message(), StatusOf(*mine).message());
}

// `late` submits so many milliseconds after the others.
void SumWithALateRank(Ranks& ranks, int late, int milliseconds_late) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (rank != late) ranks.Sum(rank, "a");
  }
  ranks.Settle();
  ranks.Advance(milliseconds(milliseconds_late));
  ranks.Sum(late, "a");
  ranks.Settle();
  ranks.ExpectAllDone();
}

TEST(LaneTest, TheWorstStepNamesTheRankThatAllWaitedFor) {
  Ranks ranks(3);
  const auto worst = [&](int rank) {
    return ranks[rank].lane().executor().traffic().at({"a"}).worst;
  };
  SumWithALateRank(ranks, 2, 50);  // negotiated
  EXPECT_EQ(worst(0).step, 1);
  EXPECT_EQ(worst(0).last_rank, 2);
  EXPECT_DOUBLE_EQ(worst(0).waited, 0.05);
  EXPECT_EQ(worst(2).last_rank, 2) << "the late one knows it, too";
  EXPECT_DOUBLE_EQ(worst(2).waited, 0.0);
  ranks.Learn({"a"});              // five more
  SumWithALateRank(ranks, 1, 80);  // by the schedule
  EXPECT_EQ(worst(0).step, 7);
  EXPECT_EQ(worst(0).last_rank, 1);
  EXPECT_DOUBLE_EQ(worst(0).waited, 0.08);
  SumWithALateRank(ranks, 2, 10);
  EXPECT_EQ(worst(0).step, 7) << "a better one changes nothing";
}

// A rank is lost after each of the steps that a scenario takes, in turn.
struct Scenario {
  const char* name;
  void (*prepare)(Ranks&);
  void (*act)(Ranks&);
  float sum = 3;  // where it comes to that
};

const Scenario kScenarios[] = {
    {"small", [](Ranks&) {}, [](Ranks& ranks) { ranks.SumOnAll("a"); }},
    {"by owners", [](Ranks&) {}, [](Ranks& ranks) { ranks.SumOnAll("a", 1500); }},
    {"around a ring", [](Ranks&) {}, [](Ranks& ranks) { ranks.SumOnAll("a", 9000); }},
    {"scheduled",
     [](Ranks& ranks) {
       ranks.Learn({"a", "b"}, 1500);
     },
     [](Ranks& ranks) {
       ranks.SumOnAll("b", 1500);
       ranks.SumOnAll("a", 1500);
     }},
    {"recalled",
     [](Ranks& ranks) {
       ranks.Learn({"a", "b"}, 1500);
     },
     [](Ranks& ranks) {
       ranks.Sum(0, "b", 1, 1500);
       for (const RequestPtr& a : ranks.SumOnAll("a", 1500)) ranks[1].Wait(a);
     }},
    {"withdrawn", [](Ranks& ranks) { ranks.Sum(0, "a", 1, 4, 1); },
     [](Ranks& ranks) {
       ranks[0].GiveUp(1, Status::InvalidArgument("rank 2 is not the reason"));
       ranks.Sum(1, "a");
     }},
    {"joined", [](Ranks& ranks) { ranks.Learn({"a"}); },
     [](Ranks& ranks) {
       ranks[0].Join();
       ranks.Sum(1, "a");
       ranks.Sum(2, "a");
       ranks[1].Join();
       ranks[2].Join();
     },
     2},
};

// True if the scenario came to its end before the rank was lost.
bool LoseAfter(int num_steps, const Scenario& scenario, bool killed) {
  Options options;
  options.ring_bytes = 10'000;
  Ranks ranks(3, options);
  scenario.prepare(ranks);
  ranks.Settle();
  scenario.act(ranks);
  std::mt19937 random(static_cast<unsigned>(num_steps));
  const auto choose = [&](size_t n) { return random() % n; };
  bool ended = false;
  for (int step = 0; step < num_steps && !ended; ++step) ended = !ranks.Step(choose);
  if (killed) {
    ranks.Kill(2, choose);
  } else {
    ranks[2].Leave();
  }
  ranks.Settle(choose);
  for (const auto& [rank, request, values] : ranks.all()) {
    EXPECT_TRUE(request->finished()) << request->meta.name << " never ends on rank " << rank;
    if (!request->finished()) return true;
    const Status status = StatusOf(*request);
    if (rank == 2) continue;
    if (status.ok()) {
      EXPECT_EQ(values->data, std::vector<float>(values->data.size(), scenario.sum));
    } else {
      EXPECT_NE(status.message().find("rank 2"), std::string::npos) << status.ToString();
    }
  }
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_FALSE(ranks[rank].lane().executor().busy()) << "rank " << rank << " keeps a batch";
  }
  return ended;
}

TEST(LaneTest, AfterAPeerIsLostAtAnyStepEveryRequestEnds) {
  for (const Scenario& scenario : kScenarios) {
    for (const bool killed : {false, true}) {
      bool ended = false;
      for (int step = 0; !ended && step < 2000; ++step) {
        SCOPED_TRACE(std::string(scenario.name) + (killed ? ", killed" : ", left") +
                     " after step " + std::to_string(step));
        ended = LoseAfter(step, scenario, killed);
        if (HasFailure()) return;
      }
      EXPECT_TRUE(ended) << scenario.name;
    }
  }
}

}  // namespace
}  // namespace dad
