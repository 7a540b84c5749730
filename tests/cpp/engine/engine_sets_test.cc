// Process sets, joined ranks, and requests that the engine numbers.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "dad/engine.h"
#include "engine_fixture.h"
#include "wire/message.h"

namespace dad {
namespace {

using std::chrono::seconds;

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

}  // namespace
}  // namespace dad
