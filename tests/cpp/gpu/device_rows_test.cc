// Allgather, alltoall and reducescatter of device tensors through the engine, on the recording
// fake: what comes out, and what is asked of NCCL. No GPU has run any of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>

#include "device_job.h"

namespace dad {
namespace {

using Values = std::vector<float>;

class DeviceRowsTest : public DeviceTest {};
class NcclRowsTest : public DeviceTest {};
INSTANTIATE_TEST_SUITE_P(Wires, DeviceRowsTest, testing::Values(Wire::kNccl, Wire::kStaged),
                         WireName);
INSTANTIATE_TEST_SUITE_P(Wires, NcclRowsTest, testing::Values(Wire::kNccl), WireName);

Request Join() {
  Request join;
  join.kind = OpKind::kJoin;
  join.name = "join";
  return join;
}

void ExpectUsed(const UserStream& stream, const std::shared_ptr<Ticket>& ticket) {
  const Status used = stream.Use(*ticket);
  EXPECT_TRUE(used.ok()) << used.ToString();
}

TEST_P(DeviceRowsTest, AllGatherOfNumbersOfRowsThatChangeFromStepToStep) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    for (int step = 0; step < 8; ++step) {
      // Of step 2 and 5 nobody has any, and now and then one has none.
      const auto rows = [&](int r) {
        return static_cast<size_t>(step % 3 == 2 ? 0 : (r + step) % 3);
      };
      DeviceValues mine(Values(rows(rank), 10.0f * rank + step), stream);
      ExpectUsed(stream, job[rank].Submit(mine.AllGather("g")));
      Values wanted;
      for (int r = 0; r < 3; ++r) wanted.insert(wanted.end(), rows(r), 10.0f * r + step);
      EXPECT_EQ(mine.gathered, wanted);
    }
  });
  EXPECT_GT(job[0].GetStats().predicted_batches, 0);
}

TEST_P(DeviceRowsTest, AllGatherOfATensorWithoutDimensionsIsARowEach) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues mine({1.0f + rank}, stream);
    Request request = mine.AllGather("scalar");
    request.tensors[0].input.shape = {};
    ExpectUsed(stream, job[rank].Submit(std::move(request)));
    EXPECT_EQ(mine.gathered, (Values{1, 2, 3}));
  });
}

TEST_P(DeviceRowsTest, AllToAllWithSplitsOfWhichSomeAreNone) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    for (int step = 0; step < 6; ++step) {
      const auto rows = [&](int from, int to) -> int64_t { return (from + 2 * to + step) % 3; };
      std::vector<int64_t> splits, received;
      Values data, wanted;
      for (int r = 0; r < 3; ++r) {
        splits.push_back(rows(rank, r));
        received.push_back(rows(r, rank));
        data.insert(data.end(), static_cast<size_t>(rows(rank, r)), 10.0f * rank + r);
        wanted.insert(wanted.end(), static_cast<size_t>(rows(r, rank)), 10.0f * r + rank);
      }
      DeviceValues mine(data, stream);
      auto ticket = job[rank].Submit(mine.AllToAll("a", splits));
      ExpectUsed(stream, ticket);
      EXPECT_EQ(mine.gathered, wanted);
      EXPECT_EQ(ticket->received_splits(), received);
    }
  });
}

TEST_P(DeviceRowsTest, AllToAllWithoutSplitsGivesEachTheSame) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues mine({1.0f + rank, 2.0f + rank, 3.0f + rank, 4.0f + rank}, stream);
    Request request = mine.AllToAll("even");
    request.tensors[0].input.shape = {2, 2};
    ExpectUsed(stream, job[rank].Submit(std::move(request)));
    EXPECT_EQ(mine.gathered, rank == 0 ? (Values{1, 2, 2, 3}) : (Values{3, 4, 4, 5}));
  });
}

TEST_P(DeviceRowsTest, ReduceScatterGivesTheRemainderToTheLowestRanks) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    for (const int num_rows : {7, 6, 2, 0, 7}) {
      Values data(static_cast<size_t>(2 * num_rows));
      std::iota(data.begin(), data.end(), 0.0f);
      DeviceValues mine(data, stream);
      Request request = mine.ReduceScatter("r" + std::to_string(num_rows), ReduceOp::kAverage);
      request.tensors[0].input.shape = {num_rows, 2};
      request.prescale = 2;
      request.postscale = 0.25;
      ExpectUsed(stream, job[rank].Submit(std::move(request)));
      const int begin = rank * (num_rows / 3) + std::min(rank, num_rows % 3);
      const int count = num_rows / 3 + (rank < num_rows % 3 ? 1 : 0);
      Values wanted(static_cast<size_t>(2 * count));
      for (size_t i = 0; i < wanted.size(); ++i) {
        wanted[i] = 0.5f * (2.0f * static_cast<float>(begin) + static_cast<float>(i));
      }
      ASSERT_EQ(mine.gathered.size(), wanted.size());
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_FLOAT_EQ(mine.gathered[i], wanted[i]);
    }
  });
}

TEST_P(DeviceRowsTest, OrderOfSubmitsMayDifferBetweenRanksAndKindsMayMix) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int step = 0; step < 12; ++step) {
      DeviceValues sum({1, 2}, stream), rows(Values(static_cast<size_t>(1 + rank), 1), stream),
          swap(Values(3, 1.0f * rank), stream), scatter({3, 6, 9}, stream),
          sent({1.0f * rank}, stream);
      std::vector<std::function<Request()>> make{
          [&] { return sum.AllReduce("sum"); }, [&] { return rows.AllGather("rows"); },
          [&] { return swap.AllToAll("swap"); }, [&] { return scatter.ReduceScatter("scatter"); },
          [&] { return sent.Broadcast("sent", 1); }};
      std::shuffle(make.begin(), make.end(), random);
      std::vector<std::shared_ptr<Ticket>> tickets;
      for (const auto& each : make) {
        tickets.push_back(job[rank].Submit(each()));
        // Waiting in between makes the batch of the others incomplete: a recall.
        if (step == 6 && rank == 1) {
          ASSERT_TRUE(tickets.back()->Wait(nccl::kLong).ok());
        }
      }
      for (auto& ticket : tickets) ExpectUsed(stream, ticket);
      EXPECT_EQ(sum.data, (Values{3, 6}));
      EXPECT_EQ(rows.gathered, Values(6, 1));
      EXPECT_EQ(swap.gathered, (Values{0, 1, 2}));
      EXPECT_EQ(scatter.gathered, Values(1, 3.0f * (3.0f * rank + 3.0f)));
      EXPECT_EQ(sent.data, Values{1});
    }
  });
}

TEST_P(DeviceRowsTest, InAProcessSetOnlyItsMembersTakePart) {
  DeviceJob job(4, GetParam(), {}, {{1, 3}});
  job.Run([&](int rank) {
    if (rank % 2 == 0) return;
    UserStream stream(rank);
    DeviceValues rows(Values(static_cast<size_t>(rank), 1.0f * rank), stream);
    DeviceValues swap({10.0f * rank, 10.0f * rank + 1}, stream), scatter({1, 2, 3}, stream);
    for (int step = 0; step < 3; ++step) {
      std::vector<std::shared_ptr<Ticket>> tickets;
      for (Request request :
           {rows.AllGather("g"), swap.AllToAll("a"), scatter.ReduceScatter("r")}) {
        request.process_set = 1;
        tickets.push_back(job[rank].Submit(std::move(request)));
      }
      for (auto& ticket : tickets) ExpectUsed(stream, ticket);
      EXPECT_EQ(rows.gathered, (Values{1, 3, 3, 3}));
      EXPECT_EQ(swap.gathered, rank == 1 ? (Values{10, 30}) : (Values{11, 31}));
      EXPECT_EQ(scatter.gathered, rank == 1 ? (Values{2, 4}) : (Values{6}));
    }
  });
}

TEST_P(DeviceRowsTest, AJoinedRankHasNoRowsAndCountsAsZeros) {
  for (const int absent : {0, 1, 2}) {
    DeviceJob job(3, GetParam());
    job.Run([&](int rank) {
      UserStream stream(rank);
      if (rank != absent) {
        DeviceValues rows(Values(static_cast<size_t>(1 + rank), 1.0f * rank), stream);
        DeviceValues swap({10.0f * rank, 10.0f * rank + 1, 10.0f * rank + 2}, stream);
        DeviceValues scatter({3, 6, 9, 12}, stream);
        auto gather = job[rank].Submit(rows.AllGather("g"));
        auto all_to_all = job[rank].Submit(swap.AllToAll("a"));
        auto average = job[rank].Submit(scatter.ReduceScatter("r", ReduceOp::kAverage));
        for (auto& ticket : {gather, all_to_all, average}) ExpectUsed(stream, ticket);
        Values gathered, swapped;
        for (int r = 0; r < 3; ++r) {
          if (r == absent) continue;
          gathered.insert(gathered.end(), static_cast<size_t>(1 + r), 1.0f * r);
          swapped.push_back(10.0f * r + rank);
        }
        EXPECT_EQ(rows.gathered, gathered);
        EXPECT_EQ(swap.gathered, swapped);
        EXPECT_EQ(all_to_all->received_splits()[static_cast<size_t>(absent)], 0);
        const Values reduced[] = {{2, 4}, {6}, {8}};
        ASSERT_EQ(scatter.gathered.size(), reduced[rank].size());
        EXPECT_FLOAT_EQ(scatter.gathered[0], reduced[rank][0]);
      }
      EXPECT_TRUE(job[rank].Submit(Join())->Wait(nccl::kLong).ok());
    });
  }
}

TEST_P(DeviceRowsTest, RanksThatDisagreeGetAnErrorAndTheNextOneWorks) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues mine(Values(4, 1), stream);
    Request request = mine.AllGather("columns");
    request.tensors[0].input.shape = rank == 0 ? Shape{2, 2} : Shape{1, 4};
    const Status status = job[rank].Submit(std::move(request))->Wait(nccl::kLong);
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.ToString();
    ExpectUsed(stream, job[rank].Submit(mine.AllGather("columns")));
    EXPECT_EQ(mine.gathered.size(), 8u);
  });
}

// ---- What is asked of NCCL.

TEST_P(NcclRowsTest, WithoutMemoryForTheResultOnOneRankItIsAnErrorOnAllAndTheNextOneWorks) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    for (const OpKind kind : {OpKind::kAllGather, OpKind::kAllToAll, OpKind::kReduceScatter}) {
      DeviceValues mine(Values(3, 1), stream), beside({1}, stream);
      mine.no_memory = rank == 1;
      auto failing = job[rank].Submit(mine.Rows("x", kind));
      auto working = job[rank].Submit(beside.AllReduce("beside"));
      const Status status = failing->Wait(nccl::kLong);
      EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
      EXPECT_NE(status.message().find(rank == 1 ? "no memory left on the device"
                                                : "\"x\": rank 1 has no memory for its result"),
                std::string::npos)
          << status.ToString();
      ExpectUsed(stream, working);
      EXPECT_EQ(beside.data, Values{3});
      mine.no_memory = false;
      ExpectUsed(stream, job[rank].Submit(mine.Rows("x", kind)));
      EXPECT_FALSE(mine.gathered.empty());
    }
    EXPECT_TRUE(job[rank].health().ok());
  });
}

TEST_P(NcclRowsTest, NothingGoesByWayOfTheHost) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues rows(Values(static_cast<size_t>(rank + 1), 1), stream), swap({1, 2}, stream),
        scatter({1, 2}, stream);
    for (Request request : {rows.AllGather("g"), swap.AllToAll("a"), scatter.ReduceScatter("r")}) {
      ExpectUsed(stream, job[rank].Submit(std::move(request)));
    }
    EXPECT_TRUE(Calls(rank, "cudaHostAlloc").empty());
    EXPECT_TRUE(Calls(rank, "cudaMallocAsync").empty());
  });
}

TEST_P(NcclRowsTest, RowsOfUnequalNumberAreOneGroupOfSendsAndReceives) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues a(Values(static_cast<size_t>(rank), 1), stream), b({1, 2, 3}, stream);
    Request both = a.AllGather("two");
    b.ready = a.ready;
    both.tensors.emplace_back();
    both.tensors[1].input = b.View();
    both.tensors[1].input.shape = {3};
    if (rank == 2) both.tensors[1].input.shape = {0};
    DeviceValues other({}, stream);
    auto first = both.allocate;
    Request unused = other.AllGather("unused");
    both.allocate = [&, second = unused.allocate](int tensor, DType dtype, const Shape& shape) {
      return tensor == 0 ? first(tensor, dtype, shape) : second(tensor, dtype, shape);
    };
    ExpectUsed(stream, job[rank].Submit(std::move(both)));
    EXPECT_EQ(a.gathered, (Values{1, 1, 1}));
    EXPECT_EQ(other.gathered, (Values{1, 2, 3, 1, 2, 3}));
    EXPECT_EQ(Calls(rank, "ncclGroupStart").size(), 1u);
    EXPECT_EQ(Calls(rank, "ncclGroupEnd").size(), 1u);
    for (const char* call : {"ncclSend", "ncclRecv"}) {
      for (const fake_gpu::Record& record : Calls(rank, call)) {
        EXPECT_TRUE(record.group);
        EXPECT_GT(record.count, 0u);
      }
    }
    // Of rank 0 nothing of the first goes out, of rank 2 nothing of the second.
    EXPECT_EQ(Calls(rank, "ncclSend").size(), rank == 1 ? 4u : 2u);
    EXPECT_EQ(Calls(rank, "ncclRecv").size(), rank == 1 ? 2u : 3u);
    // The producer's event, all transfers and the event for the consumer are on one stream.
    const void* on = Calls(rank, "ncclSend")[0].stream;
    const auto log = fake_gpu::Log(rank);
    const auto waits = std::find_if(log.begin(), log.end(), [&](const fake_gpu::Record& record) {
      return record.call == "cudaStreamWaitEvent" && record.stream == on;
    });
    const auto sends = std::find_if(log.begin(), log.end(), [](const fake_gpu::Record& record) {
      return record.call == "ncclSend";
    });
    EXPECT_LT(waits - log.begin(), sends - log.begin());
  });
}

TEST_P(NcclRowsTest, RowsOfEqualNumberAreOneAllGather) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues rows({1.0f * rank, 5}, stream);
    ExpectUsed(stream, job[rank].Submit(rows.AllGather("g")));
    EXPECT_EQ(rows.gathered, (Values{0, 5, 1, 5, 2, 5}));
    const auto calls = Calls(rank, "ncclAllGather");
    ASSERT_EQ(calls.size(), 1u);
    EXPECT_EQ(calls[0].count, 8u);
    EXPECT_TRUE(Calls(rank, "ncclSend").empty());
    EXPECT_TRUE(Calls(rank, "cudaMemcpyAsync").empty());
  });
}

TEST_P(NcclRowsTest, TheHostDoesNotWaitForTheProducer) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues rows(Values(static_cast<size_t>(rank + 1)), stream);
    stream.Hold();  // the kernel that makes the rows has not run
    auto ticket = job[rank].Submit(rows.AllGather("late"));
    EXPECT_TRUE(ticket->Wait(nccl::kLong).ok());
    EXPECT_FALSE(EventPassed(rank, ticket->done_event()).value());
    std::fill(rows.data.begin(), rows.data.end(), 1.0f + rank);
    stream.Release();
    ExpectUsed(stream, ticket);
    EXPECT_EQ(rows.gathered, (Values{1, 2, 2}));
  });
}

TEST_P(NcclRowsTest, BytesThatNcclMovesAreCountedBesideThoseAtTheSocket) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues sum(Values(1000, 1), stream), rows(Values(static_cast<size_t>(rank), 1), stream);
    DeviceValues quantised(Values(1000, 1), stream);
    for (int step = 0; step < 2; ++step) {
      ExpectUsed(stream, job[rank].Submit(sum.AllReduce("sum")));
      ExpectUsed(stream, job[rank].Submit(rows.AllGather("rows")));
      Request by_host = quantised.AllReduce("quantised");
      by_host.method = "int8";
      ExpectUsed(stream, job[rank].Submit(std::move(by_host)));
    }
    const Stats stats = job[rank].GetStats();
    std::map<std::string, TensorStats> of;
    for (const TensorStats& tensor : stats.tensors) of[tensor.name] = tensor;
    EXPECT_EQ(of["sum"].device_bytes, 8000);
    EXPECT_LT(of["sum"].wire_bytes_sent, 100);
    EXPECT_EQ(of["sum"].dense_bytes, 0);
    EXPECT_EQ(of["rows"].device_bytes, 8 * rank);
    EXPECT_EQ(of["quantised"].device_bytes, 0);
    EXPECT_GT(of["quantised"].dense_bytes, 0);
    EXPECT_EQ(stats.device_bytes, 8000 + 8 * rank);
    job[rank].ResetStats();
    EXPECT_EQ(job[rank].GetStats().device_bytes, 0);
  });
}

}  // namespace
}  // namespace dad
