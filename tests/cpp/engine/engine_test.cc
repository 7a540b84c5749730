#include "dad/engine.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <fstream>
#include <future>
#include <latch>
#include <numeric>
#include <random>
#include <set>

#include "engine_fixture.h"
#include "wire/message.h"

namespace dad {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class EngineTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EngineTest, testing::Values(1, 2, 3, 4, 7));

TEST_P(EngineTest, SumsOverRanksStepAfterStep) {
  Job job(GetParam());
  job.Run([&](int rank) {
    for (int step = 0; step < 20; ++step) {
      Values small({1.0f * rank, 2.0f, 3.0f});
      Values large(std::vector<float>(700'000, 1.0f + rank));
      auto a = job[rank].Submit(small.AllReduce("small"));
      auto b = job[rank].Submit(large.AllReduce("large", ReduceOp::kAverage));
      ASSERT_TRUE(a->Wait(seconds(20)).ok());
      ASSERT_TRUE(b->Wait(seconds(20)).ok());
      const int n = job.size();
      EXPECT_EQ(small.data[0], static_cast<float>(n * (n - 1) / 2));
      EXPECT_EQ(small.data[2], 3.0f * n);
      EXPECT_FLOAT_EQ(large.data[0], 1.0f + (n - 1) / 2.0f);
      EXPECT_EQ(large.data.front(), large.data.back());
    }
  });
}

TEST_P(EngineTest, SeveralAtOnceAreEachDoneOnceAlsoWhereOneIsRefused) {
  Job job(GetParam());
  job.Run([&](int rank) {
    for (int step = 0; step < 10; ++step) {
      std::vector<Values> values(20, Values(std::vector<float>(50, 1.0f)));
      std::vector<Request> requests;
      for (int i = 0; i < 20; ++i) {
        requests.push_back(values[i].AllReduce("t" + std::to_string(i)));
      }
      requests[7].kind = OpKind::kBroadcast;
      requests[7].root_rank = 99;
      std::vector<std::promise<Status>> done(20);
      const bool user_waits = step % 2 == 0;
      const Engine::Tickets tickets = job[rank].SubmitAll(
          std::move(requests), user_waits,
          [&](size_t place, const std::shared_ptr<Ticket>& ticket, const Status& status) {
            EXPECT_NE(ticket, nullptr);
            done[place].set_value(status);
          });
      ASSERT_EQ(tickets.size(), 20u);
      for (size_t i = 0; i < 20; ++i) {
        const Status status = done[i].get_future().get();
        EXPECT_EQ(tickets[i]->Wait(seconds(20)).code(), status.code());
        EXPECT_EQ(status.code(), i == 7 ? StatusCode::kInvalidArgument : StatusCode::kOk);
        EXPECT_EQ(values[i].data[49], i == 7 ? 1.0f : 1.0f * job.size());
      }
    }
  });
}

TEST(EngineTest, KnownTensorsNeedNoNegotiation) {
  Job job(3);
  auto step = [&](int rank) {
    std::vector<Values> values(10, Values(std::vector<float>(100, 1.0f)));
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (int i = 0; i < 10; ++i) {
      tickets.push_back(job[rank].Submit(values[i].AllReduce("t" + std::to_string(i))));
    }
    for (auto& ticket : tickets) ASSERT_TRUE(ticket->Wait(seconds(20)).ok());
    for (Values& v : values) EXPECT_EQ(v.data[50], 3.0f);
  };
  job.Run([&](int rank) {
    for (int i = 0; i < 3; ++i) step(rank);
  });
  job.Run([&](int rank) { job[rank].ResetStats(); });
  job.Run([&](int rank) {
    for (int i = 0; i < 50; ++i) step(rank);
  });
  EXPECT_EQ(job[0].GetStats().negotiations, 0);
  EXPECT_GE(job[0].GetStats().predicted_batches, 50);
}

// Steps of tensors that fit into one batch; `pause` runs after the first has been submitted.
class Steps {
 public:
  static constexpr int kNumTensors = 10;

  void Run(int count, const std::function<void(int rank, Ticket& first)>& pause) {
    job_.Run([&](int rank) {
      for (int step = 0; step < count; ++step) {
        std::vector<Values> values(kNumTensors, Values(std::vector<float>(100, 1.0f)));
        std::vector<std::shared_ptr<Ticket>> tickets;
        for (int i = 0; i < kNumTensors; ++i) {
          Request request = values[static_cast<size_t>(i)].AllReduce("t" + std::to_string(i));
          tickets.push_back(job_[rank].Submit(std::move(request)));
          if (i == 0) pause(rank, *tickets[0]);
        }
        for (auto& ticket : tickets) ASSERT_TRUE(ticket->Wait(seconds(20)).ok());
        for (Values& v : values) EXPECT_EQ(v.data[50], 2.0f);
      }
    });
  }
  // What a step takes now.
  Stats OfAStep(const std::function<void(int rank, Ticket& first)>& pause) {
    job_.Run([&](int rank) { job_[rank].ResetStats(); });
    Run(1, pause);
    return job_[0].GetStats();
  }

 private:
  Job job_{2};
};

void NoPause(int, Ticket&) {}

TEST(EngineTest, AHitchDoesNotPartABatchForEver) {
  Steps steps;
  steps.Run(3, NoPause);
  for (int hitch = 0; hitch < 3; ++hitch) {
    steps.Run(1, [](int rank, Ticket& first) {
      if (rank == 1) {
        EXPECT_TRUE(first.Wait(seconds(20)).ok());
      }
    });
    steps.Run(2, NoPause);
    const Stats stats = steps.OfAStep(NoPause);
    EXPECT_EQ(stats.predicted_batches, 1);
    EXPECT_EQ(stats.negotiations, 0);
  }
}

TEST(EngineTest, AShapeThatChangesInEveryStepLeavesTheOthersAlone) {
  Job job(2);
  auto steps = [&](int first, int count) {
    job.Run([&](int rank) {
      for (int step = first; step < first + count; ++step) {
        Values varies(std::vector<float>(static_cast<size_t>(1 + step), 1.0f));
        Values stays(std::vector<float>(100, 1.0f));
        auto a = job[rank].Submit(varies.AllReduce("varies"));
        auto b = job[rank].Submit(stays.AllReduce("stays"));
        ASSERT_TRUE(a->Wait(seconds(20)).ok());
        ASSERT_TRUE(b->Wait(seconds(20)).ok());
        EXPECT_EQ(varies.data.back(), 2.0f);
        EXPECT_EQ(stays.data[50], 2.0f);
      }
    });
  };
  steps(0, 20);
  job.Run([&](int rank) { job[rank].ResetStats(); });
  steps(20, 10);
  // One, or two where a rank is asked before it has the tensor.
  EXPECT_LE(job[0].GetStats().negotiations, 20);
  EXPECT_EQ(job[0].GetStats().predicted_batches, 10);
}

TEST(EngineTest, TensorsThatWaitForOthersTravelAlone) {
  Steps steps;
  steps.Run(1, NoPause);  // so that they are taken for tensors that are in flight together
  auto wait = [](int, Ticket& first) { EXPECT_TRUE(first.Wait(seconds(20)).ok()); };
  steps.Run(4, wait);
  const Stats stats = steps.OfAStep(wait);
  EXPECT_EQ(stats.negotiations, 0);
  EXPECT_EQ(stats.predicted_batches, Steps::kNumTensors);
}

TEST(EngineTest, OrderOfSubmitsMayDifferBetweenRanks) {
  Job job(4);
  job.Run([&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int step = 0; step < 30; ++step) {
      std::vector<int> order(20);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      std::vector<Values> values;
      for (int i = 0; i < 20; ++i) values.emplace_back(std::vector<float>(10, 1.0f * i));
      std::vector<std::shared_ptr<Ticket>> tickets;
      for (int i : order) {
        tickets.push_back(job[rank].Submit(values[i].AllReduce("t" + std::to_string(i))));
      }
      for (auto& ticket : tickets) ASSERT_TRUE(ticket->Wait(seconds(20)).ok());
      for (int i = 0; i < 20; ++i) EXPECT_EQ(values[i].data[3], 4.0f * i);
    }
  });
}

TEST(EngineTest, AWaitInTheMiddleOfAKnownOrderDoesNotHang) {
  Job job(3);
  job.Run([&](int rank) {
    // Four steps with both, then one of them alone, then both again.
    for (int step = 0; step < 12; ++step) {
      Values a({1}), b({2});
      auto first = job[rank].Submit(a.AllReduce("a"));
      std::shared_ptr<Ticket> second;
      if (step < 4 || step > 8) second = job[rank].Submit(b.AllReduce("b"));
      ASSERT_TRUE(first->Wait(seconds(20)).ok());
      if (second) {
        ASSERT_TRUE(second->Wait(seconds(20)).ok());
      }
      EXPECT_EQ(a.data[0], 3.0f);
    }
  });
}

TEST(EngineTest, APollingUserDoesNotHangEither) {
  Job job(2);
  job.Run([&](int rank) {
    for (int step = 0; step < 4; ++step) {
      Values a({1}), b({2});
      auto first = job[rank].Submit(a.AllReduce("a"));
      std::shared_ptr<Ticket> second;
      if (step < 3) second = job[rank].Submit(b.AllReduce("b"));
      const auto deadline = std::chrono::steady_clock::now() + seconds(20);
      while (!first->Done() && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(milliseconds(1));
      }
      ASSERT_TRUE(first->Done());
      if (second) {
        ASSERT_TRUE(second->Wait(seconds(20)).ok());
      }
    }
  });
}

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

TEST(EngineTest, GatherWithRowsThatChangeFromStepToStep) {
  Job job(3);
  job.Run([&](int rank) {
    for (int step = 0; step < 10; ++step) {
      const int mine = (step + rank) % 3;  // 0 rows at times
      Values v(std::vector<float>(static_cast<size_t>(mine), 1.0f * rank));
      ASSERT_TRUE(job[rank].Submit(v.AllGather("g"))->Wait(seconds(20)).ok());
      std::vector<float> expected;
      for (int r = 0; r < 3; ++r) {
        expected.insert(expected.end(), static_cast<size_t>((step + r) % 3), 1.0f * r);
      }
      EXPECT_EQ(v.gathered, expected);
    }
  });
}

TEST(EngineTest, GroupsAreDoneAsAWhole) {
  Job job(3);
  job.Run([&](int rank) {
    for (int step = 0; step < 5; ++step) {
      std::vector<Values> values;
      for (int i = 0; i < 50; ++i) {
        values.emplace_back(std::vector<float>(static_cast<size_t>(10'000 * (i % 3) + 1), 1.0f));
      }
      Request group = values[0].AllReduce("group");
      for (size_t i = 1; i < values.size(); ++i) group.tensors.push_back(values[i].View());
      ASSERT_TRUE(job[rank].Submit(std::move(group))->Wait(seconds(20)).ok());
      for (Values& v : values) EXPECT_EQ(v.data.back(), 3.0f);
    }
  });
}

TEST(EngineTest, ProcessSetsWorkSideBySide) {
  Job job(4, {}, {{0, 1}, {1, 2, 3}});
  job.Run([&](int rank) {
    for (int step = 0; step < 10; ++step) {
      Values a({1}), b({1}), c({1});
      std::vector<std::shared_ptr<Ticket>> tickets;
      if (rank <= 1) {
        Request request = a.AllReduce("x");
        request.process_set = 1;
        tickets.push_back(job[rank].Submit(std::move(request)));
      }
      if (rank >= 1) {
        Request request = b.AllReduce("x");
        request.process_set = 2;
        tickets.push_back(job[rank].Submit(std::move(request)));
      }
      tickets.push_back(job[rank].Submit(c.AllReduce("x")));
      for (auto& ticket : tickets) ASSERT_TRUE(ticket->Wait(seconds(20)).ok());
      if (rank <= 1) {
        EXPECT_EQ(a.data[0], 2.0f);
      }
      if (rank >= 1) {
        EXPECT_EQ(b.data[0], 3.0f);
      }
      EXPECT_EQ(c.data[0], 4.0f);
    }
  });
}

TEST(EngineTest, ProcessSetsComeAndGo) {
  Job job(3);
  job.Run([&](int rank) {
    for (int i = 0; i < 3; ++i) {
      auto added =
          job[rank].Submit(Bare(OpKind::kAddProcessSet, "add" + std::to_string(i), {0, 2}));
      ASSERT_TRUE(added->Wait(seconds(20)).ok());
      const int id = static_cast<int>(added->value());
      EXPECT_EQ(id, i + 1);
      EXPECT_EQ(job[rank].ProcessSetRanks(id), (std::vector<int>{0, 2}));
      Values v({1});
      Request request = v.AllReduce("x");
      request.process_set = id;
      const Status status = job[rank].Submit(std::move(request))->Wait(seconds(20));
      if (rank == 1) {
        EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      } else {
        ASSERT_TRUE(status.ok()) << status.ToString();
        EXPECT_EQ(v.data[0], 2.0f);
      }
      auto removed =
          job[rank].Submit(Bare(OpKind::kRemoveProcessSet, "remove" + std::to_string(i), {id}));
      ASSERT_TRUE(removed->Wait(seconds(20)).ok());
      EXPECT_TRUE(job[rank].ProcessSetRanks(id).empty());
    }
  });
}

TEST(EngineTest, JoinedRanksContributeNothingToAnyCollective) {
  Job job(3);
  job.Run([&](int rank) {
    for (int epoch = 0; epoch < 3; ++epoch) {
      const int steps = 4 + 3 * rank;  // rank 0 is through first
      for (int step = 0; step < steps; ++step) {
        int present = 0;
        float sum = 0;
        for (int r = 0; r < 3; ++r) {
          if (step < 4 + 3 * r) {
            ++present;
            sum += static_cast<float>(r);
          }
        }
        Values v({1, 1.0f * rank}), large(std::vector<float>(5000, 1.0f)), g({1.0f * rank});
        auto a = job[rank].Submit(v.AllReduce("a"));
        auto b = job[rank].Submit(large.AllReduce("b"));
        auto c = job[rank].Submit(g.AllGather("c"));
        ASSERT_TRUE(a->Wait(seconds(20)).ok());
        ASSERT_TRUE(b->Wait(seconds(20)).ok());
        ASSERT_TRUE(c->Wait(seconds(20)).ok());
        EXPECT_EQ(v.data[0], static_cast<float>(present));
        EXPECT_EQ(v.data[1], sum);
        EXPECT_EQ(large.data[4999], static_cast<float>(present));
        EXPECT_EQ(g.gathered.size(), static_cast<size_t>(present));
      }
      auto join = job[rank].Submit(Bare(OpKind::kJoin, "join" + std::to_string(epoch)));
      ASSERT_TRUE(join->Wait(seconds(20)).ok());
      EXPECT_EQ(join->value(), 2);
    }
  });
}

TEST(EngineTest, UnnamedRequestsAreCountedByLabelAndProcessSetAndAnewAfterAJoin) {
  Job job(3, {}, {{0, 1}});
  job.Run([&](int rank) {
    // Returns the name that it got.
    const auto submit = [&](const char* label, int process_set, bool valid = true) {
      Values v({1});
      Request request = v.AllReduce(label);
      request.process_set = process_set;
      if (!valid) request.tensors.clear();
      std::string name;
      const auto ticket = job[rank].SubmitUnnamed(std::move(request), &name);
      EXPECT_EQ(ticket->Rejected(), !valid);
      EXPECT_EQ(ticket->Wait(seconds(20)).ok(), valid);
      return name;
    };
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      EXPECT_EQ(job[rank].num_joins(), epoch);
      EXPECT_EQ(submit("a", 0), "a.noname.0");
      if (rank == 1) EXPECT_EQ(submit("a", 0, /*valid=*/false), "a.noname.1");
      EXPECT_EQ(submit("a", 0), "a.noname.1");
      EXPECT_EQ(submit("b", 0), "b.noname.0");
      if (rank < 2) EXPECT_EQ(submit("a", 1), "a.noname.0");
      // Rank 0 joins after fewer calls than rank 1, in both process sets.
      for (int i = 0; rank == 1 && i < 2; ++i) {
        EXPECT_EQ(submit("a", 1), "a.noname." + std::to_string(i + 1));
        EXPECT_EQ(submit("b", 0), "b.noname." + std::to_string(i + 1));
      }
      EXPECT_TRUE(job[rank].SubmitUnnamed(Bare(OpKind::kJoin, "join"))->Wait(seconds(20)).ok());
    }
  });
}

// Messages of a rank that does not follow the protocol, to a process set that does not exist yet.
class EarlyMessages : public testing::Test {
 protected:
  void Send(int from, int to, uint16_t lane) {
    MessageHeader header;
    header.kind = MessageKind::kNegotiate;
    header.lane = lane;
    transports_[static_cast<size_t>(from)]->Send(to, header, {}, nullptr);
  }
  // Fails with a message that has `part` in it.
  void ExpectFailure(int rank, const std::string& part) {
    Values v({1});
    const Status status = job_[rank].Submit(v.AllReduce("v"))->Wait(seconds(20));
    EXPECT_EQ(status.code(), StatusCode::kAborted) << status.ToString();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }

  std::array<Transport*, 3> transports_{};
  Job job_{3, {}, {}, [this](std::unique_ptr<Transport> transport) {
             transports_[static_cast<size_t>(transport->rank())] = transport.get();
             return transport;
           }};
};

TEST_F(EarlyMessages, OfARankThatIsNotInTheSetAreAnError) {
  Send(1, 0, 1);
  job_.Run([&](int rank) {
    (void)job_[rank].Submit(Bare(OpKind::kAddProcessSet, "set", {0, 2}))->Wait(seconds(20));
  });
  ExpectFailure(0, "rank 1: sent a message to a process set it is not in");
}

TEST_F(EarlyMessages, AreKeptOnceForEachPeer) {
  Send(1, 0, 7);
  Send(1, 0, 8);
  Send(1, 0, 7);
  ExpectFailure(0, "rank 1: sent several messages to a process set that does not exist yet");
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
  EXPECT_NE(status.message().find("rank(s) 1"), std::string::npos) << status.message();
}

TEST(EngineTest, TimelineHasThePhasesOfEachTensor) {
  const std::string path = testing::TempDir() + "dad_timeline.json";
  {
    Job job(2);
    ASSERT_TRUE(job[0].StartTimeline(path, true).ok());
    job.Run([&](int rank) {
      Values v({1});
      ASSERT_TRUE(job[rank].Submit(v.AllReduce("my \"tensor\""))->Wait(seconds(20)).ok());
    });
    ASSERT_TRUE(job[0].StopTimeline().ok());
  }
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (const char* part :
       {"NEGOTIATE_ALLREDUCE", "\"ALLREDUCE\"", "\"name\":\"allreduce.my \\\"tensor\\\"\"",
        "\"tensor\":\"my \\\"tensor\\\"\"", "dad_clock"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(text.substr(text.size() - 2), "]\n");
}

// What explains a late tensor: steps, batches, arrivals and recalls.
TEST(EngineTest, TimelineTellsWhoWasWaitedForAndWhatWasRecalled) {
  const std::string path = testing::TempDir() + "dad_timeline_late.json";
  Job job(2);
  const auto step = [&](bool with_b) {
    job.Run([&](int rank) {
      Values a({1}), b({1});
      auto first = job[rank].Submit(a.AllReduce("a"));
      auto second = with_b ? job[rank].Submit(b.AllReduce("b")) : nullptr;
      ASSERT_TRUE(first->Wait(seconds(20)).ok());
      if (second) {
        ASSERT_TRUE(second->Wait(seconds(20)).ok());
      }
    });
  };
  const auto trace = [&](bool with_b) {
    EXPECT_TRUE(job[0].StartTimeline(path, false).ok());
    step(with_b);
    EXPECT_TRUE(job[0].StopTimeline().ok());
    std::ifstream file(path);
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  };
  const std::string first = trace(true);
  EXPECT_NE(first.find("NEGOTIATE_ALLREDUCE"), std::string::npos);
  EXPECT_NE(first.find("\"step\":1,\"batch\":\"negotiation "), std::string::npos);
  for (int i = 0; i < 3; ++i) step(true);
  const std::string scheduled = trace(true);
  EXPECT_EQ(scheduled.find("NEGOTIATE_"), std::string::npos) << "nothing is negotiated";
  for (const char* part : {"WAIT_FOR_BATCH", "\"step\":5,\"batch\":\"schedule ",
                           "\"last_rank\":", "\"arrived_us\":{\"1\":"}) {
    EXPECT_NE(scheduled.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(scheduled.find("RECALL"), std::string::npos);
  const std::string recalled = trace(false);
  EXPECT_NE(recalled.find("\"name\":\"RECALL\""), std::string::npos);
  EXPECT_NE(recalled.find("\"missing\":[\"b\""), std::string::npos);
}

TEST(EngineTest, TuningGoesOnWhileTheStepsDo) {
  Options options;
  options.autotune = true;
  options.autotune_log = testing::TempDir() + "dad_autotune.csv";
  {
    Job job(2, options);
    job.Run([&](int rank) {
      for (int step = 0; step < 150; ++step) {
        Values a(std::vector<float>(300'000, 1.0f)), b({1});
        auto first = job[rank].Submit(a.AllReduce("a"));
        auto second = job[rank].Submit(b.AllReduce("b"));
        ASSERT_TRUE(first->Wait(seconds(20)).ok());
        ASSERT_TRUE(second->Wait(seconds(20)).ok());
        ASSERT_EQ(a.data[299'999], 2.0f);
      }
    });
  }
  std::ifstream file(options.autotune_log);
  std::string line;
  int lines = 0;
  while (std::getline(file, line)) ++lines;
  EXPECT_EQ(lines, 1 + 7);  // a heading, and 256 kB to 16 MB
}

// A ring begins the sum of each piece at another rank, owners all at rank 0.
// The steps of a new job in which a large tensor went around a ring; the line has its rate after
// the first.
std::set<int> StepsByRing(double line_rate) {
  Options options;
  options.ring_bytes = -1;
  options.fusion_bytes = 1 << 21;
  Job job(4, options);
  std::set<int> by_ring;
  job.Run([&](int rank) {
    for (int step = 0; step < 4; ++step) {
      // The sum depends on the order, and only in a ring that differs within a tensor.
      Values values(std::vector<float>(1 << 20, rank == 1 ? 1.0f : rank == 0 ? 1e8f : -5e7f));
      ASSERT_TRUE(job[rank].Submit(values.AllReduce("t"))->Wait(seconds(20)).ok());
      const auto [least, most] = std::minmax_element(values.data.begin(), values.data.end());
      if (rank == 0 && *least != *most) by_ring.insert(step);
      if (step == 0) job.network().SetLineRate(line_rate);
    }
  });
  return by_ring;
}

TEST(EngineTest, LargeTensorsGoAroundARingWhereTheLineIsSlow) {
  for (const double line_rate : {0.0, 10e6, 1e9}) {
    std::set<int> by_ring;
    // On a busy machine every answer may take so long at start-up that the ranks seem far apart:
    // again.
    for (int job = 0; job < 20; ++job) {
      by_ring = StepsByRing(line_rate);
      if (!by_ring.contains(0)) break;
    }
    EXPECT_EQ(by_ring, line_rate == 10e6 ? std::set<int>({1, 2, 3}) : std::set<int>()) << line_rate;
  }
}

// What rank 0 sent in each step of a new job; the line has its rate after the first.
std::vector<int64_t> BytesBySteps(int64_t pack, double line_rate) {
  Options options;
  options.pack = pack;
  options.ring_bytes = 0;
  Job job(4, options);
  std::vector<int64_t> bytes;
  job.Run([&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    std::normal_distribution<float> normal;
    std::vector<float> data(100'000);
    for (float& x : data) x = normal(random);
    for (int step = 0; step < 3; ++step) {
      if (rank == 0) job[rank].ResetStats();
      Values values(data);
      ASSERT_TRUE(job[rank].Submit(values.AllReduce("t"))->Wait(seconds(20)).ok());
      if (rank == 0) bytes.push_back(job[rank].GetStats().tensors[0].wire_bytes_sent);
      if (step == 0) job.network().SetLineRate(line_rate);
    }
  });
  return bytes;
}

TEST(EngineTest, DenseTensorsTravelPackedWhereTheLineIsSlow) {
  constexpr int64_t kDense = 2 * 3 * 100'000;  // 3/4 of 400 kB, twice
  const auto packed = [](int64_t pack, double line_rate) {
    std::vector<bool> steps;
    for (int64_t bytes : BytesBySteps(pack, line_rate)) {
      EXPECT_TRUE(bytes == kDense || (bytes > kDense / 2 && bytes < kDense * 9 / 10)) << bytes;
      steps.push_back(bytes < kDense);
    }
    return steps;
  };
  using Steps = std::vector<bool>;
  EXPECT_EQ(packed(-1, 10e6), (Steps{false, true, true}));
  EXPECT_EQ(packed(-1, 1e9), (Steps{false, false, false}));
  EXPECT_EQ(packed(-1, 0), (Steps{false, false, false}));
  EXPECT_EQ(packed(0, 10e6), (Steps{false, false, false}));
  EXPECT_EQ(packed(1, 1e9), (Steps{true, true, true}));
}

// Also when some ranks have joined, around a ring, with slices in flight and small tensors between.
TEST(EngineTest, PackedTensorsHaveTheBitsOfPlainOnes) {
  for (const int64_t ring_bytes : {0, 1000}) {
    std::vector<std::vector<float>> results;
    for (const int64_t pack : {0, 1}) {
      Options options;
      options.pack = pack;
      options.ring_bytes = ring_bytes;
      options.fusion_bytes = 1 << 16;
      Job job(4, options);
      job.network().SetJitter(std::chrono::microseconds(50), 3);
      std::vector<float> result;
      job.Run([&](int rank) {
        std::mt19937 random(static_cast<unsigned>(rank));
        std::normal_distribution<float> normal;
        for (int step = 0; step < 4 + rank % 2; ++step) {
          std::vector<float> data(50'001), few(700);
          for (float& x : data) x = random() % 4 == 0 ? 0.0f : normal(random);
          for (float& x : few) x = normal(random);
          Values large(data), small(few);
          auto first = job[rank].Submit(large.AllReduce("large", ReduceOp::kAverage));
          auto second = job[rank].Submit(small.AllReduce("small"));
          ASSERT_TRUE(first->Wait(seconds(20)).ok());
          ASSERT_TRUE(second->Wait(seconds(20)).ok());
          if (rank != 1) continue;
          result.insert(result.end(), large.data.begin(), large.data.end());
          result.insert(result.end(), small.data.begin(), small.data.end());
        }
        ASSERT_TRUE(job[rank].Submit(Bare(OpKind::kJoin, "join"))->Wait(seconds(20)).ok());
      });
      results.push_back(result);
    }
    EXPECT_EQ(results[0].size(), 5u * 50'701u);
    EXPECT_EQ(results[0], results[1]);
  }
}

TEST(EngineTest, ResultsDoNotDependOnWhatIsFusedWithWhat) {
  std::vector<std::vector<float>> results;
  for (int64_t fusion : {0, 1000, 100'000'000}) {
    Options options;
    options.fusion_bytes = fusion;
    Job job(3, options);
    std::vector<float> result;
    job.Run([&](int rank) {
      std::mt19937 random(static_cast<unsigned>(rank));
      std::normal_distribution<float> normal;
      std::vector<float> data(3001);
      for (float& x : data) x = normal(random);
      Values a(data), b(data);
      auto first = job[rank].Submit(a.AllReduce("a", ReduceOp::kAverage));
      auto second = job[rank].Submit(b.AllReduce("b", ReduceOp::kAverage));
      ASSERT_TRUE(first->Wait(seconds(20)).ok());
      ASSERT_TRUE(second->Wait(seconds(20)).ok());
      EXPECT_EQ(a.data, b.data);
      if (rank == 0) result = a.data;
    });
    results.push_back(result);
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

}  // namespace
}  // namespace dad
