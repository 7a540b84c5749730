// What ranks disagree on, and what becomes of a peer that is lost, silent or gone.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <future>
#include <latch>
#include <string>
#include <vector>

#include "dad/engine.h"
#include "engine_fixture.h"

namespace dad {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(EngineTest, ShapeMismatchFailsThatTensorOnAllRanksAndNothingElse) {
  Job job(3);
  job.Run([&](int rank) {
    for (int step = 0; step < 6; ++step) {
      Values good({1}), bad(std::vector<float>(step == 4 && rank == 2 ? 5 : 4, 1.0f));
      auto a = job[rank].Submit(bad.AllReduce("bad"));
      auto b = job[rank].Submit(good.AllReduce("good"));
      const Status status = a->Wait(seconds(20));
      if (step == 4) {
        EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
        EXPECT_EQ(status.message(),
                  "ranks disagree on \"bad\": shape [4] on rank 0, [5] on rank 2");
      } else {
        EXPECT_TRUE(status.ok()) << status.ToString();
        EXPECT_EQ(bad.data[0], 3.0f);
      }
      ASSERT_TRUE(b->Wait(seconds(20)).ok());
      EXPECT_EQ(good.data[0], 3.0f);
    }
  });
}

TEST(EngineTest, AChangeOfShapeOnAllRanksIsNoMismatch) {
  Job job(3);
  job.Run([&](int rank) {
    for (int step = 0; step < 12; ++step) {
      Values v(std::vector<float>(static_cast<size_t>(1 + step / 4), 1.0f));
      ASSERT_TRUE(job[rank].Submit(v.AllReduce("v"))->Wait(seconds(20)).ok());
      EXPECT_EQ(v.data.back(), 3.0f);
    }
  });
}

TEST(EngineTest, EveryKindOfDisagreementNamesTheValues) {
  Job job(2);
  auto message = [&](const std::function<void(Request&)>& change) {
    std::vector<std::string> messages(2);
    job.Run([&](int rank) {
      Values v({1, 2, 3, 4});
      Request request = v.AllReduce("x");
      if (rank == 1) change(request);
      messages[static_cast<size_t>(rank)] =
          job[rank].Submit(std::move(request))->Wait(seconds(20)).message();
    });
    EXPECT_EQ(messages[0], messages[1]);
    return messages[0];
  };
  EXPECT_EQ(message([](Request& r) { r.op = ReduceOp::kMax; }),
            "ranks disagree on \"x\": op Sum on rank 0, Max on rank 1");
  EXPECT_EQ(message([](Request& r) { r.tensors[0].input.dtype = DType::kInt32; }),
            "ranks disagree on \"x\": dtype float32 on rank 0, int32 on rank 1");
  EXPECT_EQ(message([](Request& r) {
              r.kind = OpKind::kBroadcast;
              r.root_rank = 0;
            }),
            "ranks disagree on \"x\": collective allreduce on rank 0, broadcast on rank 1");
  EXPECT_EQ(message([](Request& r) { r.method = "int8;bucket=8"; }),
            "ranks disagree on \"x\": method none on rank 0, int8;bucket=8 on rank 1");
  EXPECT_NE(message([](Request& r) { r.postscale = 2; }).find("postscale"), std::string::npos);
}

TEST(EngineTest, SameNameTwiceInFlightIsAnError) {
  Job job(2);
  std::latch refused(1);
  job.Run([&](int rank) {
    Values a({1}), b({1});
    // Rank 1 comes late, so that the first is still in flight.
    if (rank == 1) refused.wait();
    auto first = job[rank].Submit(a.AllReduce("twin"));
    if (rank == 0) {
      const Status status = job[rank].Submit(b.AllReduce("twin"))->Wait(seconds(20));
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      refused.count_down();
    }
    EXPECT_TRUE(first->Wait(seconds(20)).ok());
  });
}

TEST(EngineTest, CollectivesOfDifferentKindsMayShareAName) {
  Job job(2);
  job.Run([&](int rank) {
    for (int step = 0; step < 6; ++step) {
      Values sum({1}), rows({1.0f * rank});
      auto a = job[rank].Submit(sum.AllReduce("x"));
      auto b = job[rank].Submit(rows.AllGather("x"));
      ASSERT_TRUE(a->Wait(seconds(20)).ok());
      ASSERT_TRUE(b->Wait(seconds(20)).ok());
      EXPECT_EQ(sum.data[0], 2.0f);
      EXPECT_EQ(rows.gathered, (std::vector<float>{0, 1}));
    }
    // Known or not, a rank that has something else under the name gets an error, as the others do.
    for (const std::string name : {"x", "new"}) {
      Values v({1});
      const Status status =
          job[rank].Submit(rank ? v.Broadcast(name, 0) : v.AllReduce(name))->Wait(seconds(20));
      EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.ToString();
      ASSERT_TRUE(job[rank].Submit(v.AllReduce(name))->Wait(seconds(20)).ok());
    }
  });
}

// Of a step that ranks disagree on, one has sent all and the other only what comes first.
TEST(EngineTest, AStepThatFailsOnAllRanksLeavesNothingInFlight) {
  Job job(2);
  std::promise<void> given_up;
  job.Run([&](int rank) {
    uint64_t number = static_cast<uint64_t>(100 * rank);
    auto step = [&](bool fails) {
      ++number;
      std::vector<Values> values;
      for (int i = 0; i < 8; ++i) values.emplace_back(std::vector<float>(4, 1.0f + rank));
      if (fails && rank == 1) values[3].data.resize(5);
      std::vector<std::shared_ptr<Ticket>> tickets;
      for (int i = 0; i < (fails && rank == 1 ? 4 : 8); ++i) {
        Request request = values[i].AllReduce("t" + std::to_string(i));
        request.step = number;
        tickets.push_back(job[rank].Submit(std::move(request)));
      }
      for (size_t i = 0; i < tickets.size(); ++i) {
        const Status status = tickets[i]->Wait(seconds(20));
        if (!fails) {
          EXPECT_TRUE(status.ok()) << status.ToString();
          EXPECT_EQ(values[i].data[0], 3.0f);
        } else if (i >= 3) {
          EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.ToString();
        }
      }
      if (fails) {
        Values late({1});
        Request request = late.AllReduce("late");
        request.step = number;
        EXPECT_EQ(job[rank].Submit(std::move(request))->Wait(seconds(20)).code(),
                  StatusCode::kFailedPrecondition);
      }
    };
    for (const bool fails :
         {true, false, false, false, true, true, false, false, false, true, false}) {
      step(fails);
    }
    Values other({1});
    Request request = other.AllReduce("other");
    request.step = 1000;
    if (rank == 0) {
      auto ticket = job[rank].Submit(std::move(request));
      job[rank].GiveUp(1000, Status::FailedPrecondition("by hand"));
      EXPECT_EQ(ticket->Wait(seconds(20)).message(), "by hand");
      given_up.set_value();
    } else {
      given_up.get_future().wait();  // else it may take the other one at its word
    }
    ASSERT_TRUE(job[rank].Submit(other.AllReduce("other"))->Wait(seconds(20)).ok());
  });
}

TEST(EngineTest, KilledPeerFailsEverybodyByName) {
  Job job(4);
  std::atomic<int> failures{0};
  std::barrier all_warm(4);  // a rank that dies takes along what it has sent and nobody has read
  job.Run([&](int rank) {
    Values warm({1});
    EXPECT_TRUE(job[rank].Submit(warm.AllReduce("warm"))->Wait(seconds(20)).ok());
    all_warm.arrive_and_wait();
    if (rank == 2) return job.network().Kill(2);
    Values v({1});
    const Status status = job[rank].Submit(v.AllReduce("v"))->Wait(seconds(20));
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_EQ(status.message(), "rank 2 closed the connection");
    // And from now on.
    EXPECT_EQ(job[rank].Submit(v.AllReduce("w"))->Wait(seconds(20)).code(), StatusCode::kAborted);
    ++failures;
  });
  EXPECT_EQ(failures, 3);
}

TEST(EngineTest, SilentPeerFailsEverybodyAfterTheTimeout) {
  Options options;
  options.timeout_seconds = 0.5;
  Job job(3, options);
  job.Run([&](int rank) {
    Values warm({1});
    ASSERT_TRUE(job[rank].Submit(warm.AllReduce("warm"))->Wait(seconds(20)).ok());
    if (rank == 1) return job.network().Silence(1);
    Values v({1});
    const Status status = job[rank].Submit(v.AllReduce("v"))->Wait(seconds(20));
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
  });
}

TEST(EngineTest, SlowPeerIsNotASilentOne) {
  Options options;
  options.timeout_seconds = 0.3;
  Job job(2, options);
  job.Run([&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(seconds(1));
    Values v({1});
    EXPECT_TRUE(job[rank].Submit(v.AllReduce("v"))->Wait(seconds(20)).ok());
  });
}

TEST(EngineTest, APeerThatShutsDownFailsWhatNeedsIt) {
  Job job(3);
  job.Run([&](int rank) {
    Values warm({1});
    ASSERT_TRUE(job[rank].Submit(warm.AllReduce("warm"))->Wait(seconds(20)).ok());
    if (rank == 2) return job.Leave(2);
    Values v({1});
    const Status status = job[rank].Submit(v.AllReduce("v"))->Wait(seconds(20));
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_NE(status.message().find("rank 2"), std::string::npos) << status.message();
  });
}

TEST(EngineTest, DestructorFailsEveryOpenTicket) {
  std::shared_ptr<Ticket> open;
  Values v({1});
  {
    Job job(2);
    open = job[0].Submit(v.AllReduce("never"));
  }
  EXPECT_EQ(open->Wait(seconds(1)).code(), StatusCode::kAborted);
}

TEST(EngineTest, WaitGivesUpAfterItsTimeoutAndTheRequestGoesOn) {
  Job job(2);
  std::latch gave_up(1);
  job.Run([&](int rank) {
    Values v({1});
    if (rank == 1) gave_up.wait();
    auto ticket = job[rank].Submit(v.AllReduce("v"));
    if (rank == 0) {
      EXPECT_EQ(ticket->Wait(milliseconds(20)).code(), StatusCode::kTimeout);
      gave_up.count_down();
    }
    EXPECT_TRUE(ticket->Wait(seconds(20)).ok());
    EXPECT_EQ(v.data[0], 2.0f);
  });
}

TEST(EngineTest, StallShutdownNamesTensorAndRanks) {
  Options options;
  options.stall_warning_seconds = 0.1;
  options.stall_shutdown_seconds = 0.3;
  Job job(2, options);
  Values v({1});
  const Status status = job[0].Submit(v.AllReduce("lonely"))->Wait(seconds(20));
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  EXPECT_NE(status.message().find("\"lonely\""), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("by rank 1 within"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace dad
