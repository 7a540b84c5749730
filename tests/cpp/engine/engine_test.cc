// What an engine does over ranks of one process; engine_*_test.cc have the rest of it.
#include "dad/engine.h"

#include <gtest/gtest.h>

#include <fstream>
#include <future>
#include <string>
#include <vector>

#include "engine_fixture.h"

namespace dad {
namespace {

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

}  // namespace
}  // namespace dad
