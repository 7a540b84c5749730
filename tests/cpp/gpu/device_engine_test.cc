// Device tensors through the engine, on the recording fake: what is asked of CUDA and NCCL, in
// which order, and what comes out. No GPU has run any of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>

#include "device_job.h"

namespace dad {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class DeviceEngineTest : public DeviceTest {};
class NcclEngineTest : public DeviceEngineTest {};
class StagedEngineTest : public DeviceEngineTest {};

INSTANTIATE_TEST_SUITE_P(Wires, DeviceEngineTest, testing::Values(Wire::kNccl, Wire::kStaged),
                         WireName);
INSTANTIATE_TEST_SUITE_P(Wires, NcclEngineTest, testing::Values(Wire::kNccl), WireName);
INSTANTIATE_TEST_SUITE_P(Wires, StagedEngineTest, testing::Values(Wire::kStaged), WireName);

TEST_P(DeviceEngineTest, SumsOverRanksStepAfterStep) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    for (int step = 0; step < 10; ++step) {
      DeviceValues small({1.0f * rank, 2.0f, 3.0f}, stream);
      DeviceValues large(std::vector<float>(70'000, 1.0f + rank), stream);
      auto a = job[rank].Submit(small.AllReduce("small"));
      auto b = job[rank].Submit(large.AllReduce("large", ReduceOp::kAverage));
      const Status used = stream.Use(*a);
      ASSERT_TRUE(used.ok()) << used.ToString();
      ASSERT_TRUE(stream.Use(*b).ok());
      EXPECT_EQ(small.data, (std::vector<float>{3, 6, 9}));
      EXPECT_FLOAT_EQ(large.data.front(), 2.0f);
      EXPECT_FLOAT_EQ(large.data.back(), 2.0f);
    }
  });
  EXPECT_GT(job[0].GetStats().predicted_batches, 0);
}

TEST_P(DeviceEngineTest, WorkStartsAfterTheProducersStreamAndTheHostDoesNotWaitForIt) {
  DeviceJob job(2, GetParam());
  std::atomic<int> submitted{0};
  std::atomic<bool> released{false};
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues values({0, 0}, stream);
    stream.Hold();  // the kernel that makes the values has not run
    auto ticket = job[rank].Submit(values.AllReduce("late"));
    ++submitted;
    while (submitted < 2) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(30));
    EXPECT_EQ(values.data, (std::vector<float>{0, 0}));
    if (GetParam() == Wire::kNccl) {
      EXPECT_TRUE(ticket->Wait(nccl::kLong).ok());  // it is on its way, though nothing has run
      EXPECT_FALSE(EventPassed(rank, ticket->done_event()).value());
    } else {
      EXPECT_FALSE(ticket->Done());
    }
    values.data = {1.0f + rank, 10};
    stream.Release();
    const Status used = stream.Use(*ticket);
    EXPECT_TRUE(used.ok()) << used.ToString();
    EXPECT_EQ(values.data, (std::vector<float>{3, 20}));
    released = true;
  });
}

TEST_P(DeviceEngineTest, BroadcastGatherIntegersAndScales) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues sent({10.0f * rank, 5}, stream);
    auto broadcast = job[rank].Submit(sent.Broadcast("b", 2));
    DeviceValues rows(std::vector<float>(static_cast<size_t>(rank), 1.0f * rank), stream);
    auto gather = job[rank].Submit(rows.AllGather("g"));
    DeviceValues scaled({2, 4}, stream);
    Request by_factors = scaled.AllReduce("s", ReduceOp::kAverage);
    by_factors.prescale = 0.5;
    by_factors.postscale = 3;
    auto scale = job[rank].Submit(std::move(by_factors));
    DeviceValues largest({1.0f * rank, -1.0f * rank}, stream);
    auto max = job[rank].Submit(largest.AllReduce("m", ReduceOp::kMax));
    for (auto& ticket : {broadcast, gather, scale, max}) {
      const Status used = stream.Use(*ticket);
      ASSERT_TRUE(used.ok()) << used.ToString();
    }
    EXPECT_EQ(sent.data, (std::vector<float>{20, 5}));
    EXPECT_EQ(rows.gathered, (std::vector<float>{1, 2, 2}));
    EXPECT_FLOAT_EQ(scaled.data[0], 3);
    EXPECT_FLOAT_EQ(scaled.data[1], 6);
    EXPECT_EQ(largest.data, (std::vector<float>{2, 0}));
  });
}

TEST_P(DeviceEngineTest, HostOnOneRankAndDeviceOnAnotherIsAnErrorThatNamesThem) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues values({1}, stream);
    Request request = values.AllReduce("mixed");
    if (rank == 1) {
      for (TensorView* view : {&request.tensors[0].input, &request.tensors[0].output}) {
        view->device = DeviceType::kCpu;
        view->device_index = -1;
      }
    }
    const Status status = job[rank].Submit(std::move(request))->Wait(nccl::kLong);
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.ToString();
    EXPECT_NE(
        status.message().find("\"mixed\": device a CUDA device on rank 0, the host on rank 1"),
        std::string::npos)
        << status.message();
    // And the engine goes on.
    auto again = job[rank].Submit(values.AllReduce("again"));
    EXPECT_TRUE(stream.Use(*again).ok());
    EXPECT_EQ(values.data[0], 2);
  });
}

TEST_P(DeviceEngineTest, TensorsOfOneRequestInTwoPlacesAreRefused) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues values({1}, stream);
    Request request = values.AllReduce("two places");
    request.tensors.push_back(request.tensors[0]);
    request.tensors[1].input.device = DeviceType::kCpu;
    request.tensors[1].input.device_index = -1;
    const Status status = job[rank].Submit(std::move(request))->Wait(nccl::kLong);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
  });
}

TEST_P(DeviceEngineTest, OrderOfSubmitsMayDifferBetweenRanks) {
  DeviceJob job(4, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int step = 0; step < 15; ++step) {
      std::vector<int> order(12);
      for (int i = 0; i < 12; ++i) order[static_cast<size_t>(i)] = i;
      std::shuffle(order.begin(), order.end(), random);
      std::vector<DeviceValues> values;
      for (int i = 0; i < 12; ++i) values.emplace_back(std::vector<float>(5, 1.0f * i), stream);
      std::vector<std::shared_ptr<Ticket>> tickets;
      for (int i : order) {
        tickets.push_back(
            job[rank].Submit(values[static_cast<size_t>(i)].AllReduce("t" + std::to_string(i))));
        if (step == 7 && i == 3) {
          ASSERT_TRUE(tickets.back()->Wait(seconds(20)).ok());
        }
      }
      for (auto& ticket : tickets) ASSERT_TRUE(stream.Use(*ticket).ok());
      for (int i = 0; i < 12; ++i) EXPECT_EQ(values[static_cast<size_t>(i)].data[3], 4.0f * i);
    }
  });
}

TEST_P(DeviceEngineTest, AMethodComputesOnTheHost) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues values(std::vector<float>(1000, 0.5f + rank), stream);
    Request request = values.AllReduce("q", ReduceOp::kAverage);
    request.method = "int8";
    auto ticket = job[rank].Submit(std::move(request));
    const Status used = stream.Use(*ticket);
    ASSERT_TRUE(used.ok()) << used.ToString();
    EXPECT_NEAR(values.data[7], 1.0f, 0.02f);
  });
  EXPECT_EQ(fake_gpu::Count("ncclAllReduce"), 0);
}

TEST_P(DeviceEngineTest, FactorsOfALayerComeFromTheDevice) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues a({1, 2, 3}, stream);            // one row of three
    DeviceValues d({1.0f + rank, 0.0f}, stream);  // of two outputs
    DeviceValues out(std::vector<float>(6, -1), stream);
    Request request = a.AllReduce("layer");
    request.method = "factor;layer=2x3";
    Contribution& tensor = request.tensors[0];
    tensor.layers.emplace_back();
    tensor.layers[0].rows.emplace_back();
    RowsSegment& rows = tensor.layers[0].rows[0];
    rows.a = a.View();
    rows.a.shape = {1, 3};
    d.ready = a.ready;
    rows.d = d.View();
    rows.d.shape = {1, 2};
    out.ready = a.ready;
    tensor.layers[0].output = out.View();
    tensor.layers[0].output.shape = {2, 3};
    tensor.input.data = tensor.output.data = nullptr;
    tensor.input.shape = {6};
    auto ticket = job[rank].Submit(std::move(request));
    const Status used = stream.Use(*ticket);
    ASSERT_TRUE(used.ok()) << used.ToString();
    EXPECT_EQ(out.data, (std::vector<float>{3, 6, 9, 0, 0, 0}));
  });
}

TEST_P(DeviceEngineTest, AloneItIsACopy) {
  DeviceJob job(1, Wire::kStaged);
  UserStream stream(0);
  DeviceValues values({1, 2}, stream);
  Request request = values.AllReduce("alone");
  request.prescale = 2;
  auto ticket = job[0].Submit(std::move(request));
  const Status used = stream.Use(*ticket);
  ASSERT_TRUE(used.ok()) << used.ToString();
  EXPECT_EQ(values.data, (std::vector<float>{2, 4}));
}

TEST_P(DeviceEngineTest, AJoinedRankCountsAsZeros) {
  DeviceJob job(3, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    Request join;
    join.kind = OpKind::kJoin;
    join.name = "join";
    if (rank != 2) {
      // Alone, and with another in one batch.
      DeviceValues a({1}, stream), b({2}, stream), c({3, 4}, stream);
      auto first = job[rank].Submit(a.AllReduce("a"));
      EXPECT_TRUE(stream.Use(*first).ok());
      Request group = b.AllReduce("b and c");
      c.ready = b.ready;
      group.tensors.emplace_back();
      group.tensors[1].input = group.tensors[1].output = c.View();
      auto second = job[rank].Submit(std::move(group));
      const Status used = stream.Use(*second);
      ASSERT_TRUE(used.ok()) << used.ToString();
      EXPECT_EQ(c.data, (std::vector<float>{6, 8}));
      EXPECT_EQ(a.data[0], 2);
      EXPECT_EQ(b.data[0], 4);
    }
    EXPECT_TRUE(job[rank].Submit(std::move(join))->Wait(nccl::kLong).ok());
  });
}

TEST_P(DeviceEngineTest, KeepsTheTensorsUntilTheDeviceIsThroughWithThem) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues values({1}, stream);
    auto held = std::make_shared<int>(1);
    const std::weak_ptr<int> watch = held;
    if (GetParam() == Wire::kNccl) stream.Hold();
    Request request = values.AllReduce("kept");
    request.keep_alive =
        std::make_shared<std::pair<DeviceEvent, std::shared_ptr<int>>>(values.ready, held);
    held.reset();
    auto ticket = job[rank].Submit(std::move(request));
    EXPECT_TRUE(ticket->Wait(nccl::kLong).ok());
    if (GetParam() == Wire::kNccl) {
      EXPECT_FALSE(watch.expired());
      stream.Release();
    }
    EXPECT_TRUE(stream.Use(*ticket).ok());
    // Another rank's thread may be releasing it right now.
    for (int i = 0; i < 1000 && !watch.expired(); ++i) {
      ReleasePassed();
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_TRUE(watch.expired());
  });
}

// ---- What is asked of CUDA and NCCL.

TEST_P(NcclEngineTest, OneTensorIsReducedWhereItIs) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues values({1, 2, 3}, stream);
    auto ticket = job[rank].Submit(values.AllReduce("one"));
    EXPECT_TRUE(stream.Use(*ticket).ok());
    EXPECT_TRUE(Calls(rank, "cudaMemcpyAsync").empty());
    EXPECT_TRUE(Calls(rank, "cudaHostAlloc").empty());
    const auto reduced = Calls(rank, "ncclAllReduce");
    ASSERT_EQ(reduced.size(), 1u);
    EXPECT_EQ(reduced[0].count, 3u);
    // The producer's event, the reduction and the event for the consumer are on one stream.
    std::vector<std::string> on_stream;
    for (const auto& record : fake_gpu::Log(rank)) {
      if (record.stream == reduced[0].stream) on_stream.push_back(record.call);
    }
    on_stream.erase(on_stream.begin());  // its creation
    EXPECT_EQ(on_stream,
              (std::vector<std::string>{"cudaStreamWaitEvent", "cudaStreamWaitEvent",
                                        "ncclAllReduce", "cudaEventRecord", "cudaEventRecord"}));
  });
}

TEST_P(NcclEngineTest, TensorsOfOneBatchShareOneReduction) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    for (int step = 0; step < 3; ++step) {
      DeviceValues a({1, 2, 3}, stream), b(std::vector<float>(100, 1), stream);
      Request group = a.AllReduce("group");
      b.ready = a.ready;
      group.tensors.emplace_back();
      group.tensors[1].input = group.tensors[1].output = b.View();
      auto ticket = job[rank].Submit(std::move(group));
      ASSERT_TRUE(stream.Use(*ticket).ok());
      EXPECT_EQ(a.data, (std::vector<float>{2, 4, 6}));
      EXPECT_EQ(b.data[99], 2);
    }
    // With padding between the two, in a buffer that is used again.
    const auto reduced = Calls(rank, "ncclAllReduce");
    ASSERT_EQ(reduced.size(), 3u);
    EXPECT_EQ(reduced[2].count, (256u + 512u) / 4);
    EXPECT_EQ(Calls(rank, "cudaMallocAsync").size(), 1u);
  });
}

TEST_P(StagedEngineTest, CopiesThroughPageLockedMemoryThatIsUsedAgain) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    for (int step = 0; step < 6; ++step) {
      DeviceValues values({1, 2, 3}, stream);
      auto ticket = job[rank].Submit(values.AllReduce("one"));
      EXPECT_TRUE(stream.Use(*ticket).ok());
    }
    EXPECT_LE(Calls(rank, "cudaHostAlloc").size(), 2u);
    EXPECT_EQ(Calls(rank, "cudaMemcpyAsync").size(), 12u);
    EXPECT_TRUE(Calls(rank, "ncclAllReduce").empty());
  });
}

// ---- Faults.

TEST_P(NcclEngineTest, AnErrorOfNcclEndsTheEngineAndSaysSo) {
  DeviceJob job(2, GetParam());
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues values({1}, stream);
    auto first = job[rank].Submit(values.AllReduce("first"));
    EXPECT_TRUE(stream.Use(*first).ok());
    stream.Hold();
    auto second = job[rank].Submit(values.AllReduce("second"));
    EXPECT_TRUE(second->Wait(nccl::kLong).ok());
    if (rank == 0) fake_gpu::SetAsyncError(0, 6);
    const auto deadline = std::chrono::steady_clock::now() + seconds(10);
    while (job[rank].health().ok() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_NE(job[rank].health().message().find("NCCL"), std::string::npos)
        << job[rank].health().ToString();
    stream.Release();
    EXPECT_FALSE(job[rank].Submit(values.AllReduce("third"))->Wait(nccl::kLong).ok());
  });
  EXPECT_GE(fake_gpu::Count("ncclCommAbort"), 1);
}

TEST_P(DeviceEngineTest, ALostPeerIsAnErrorInBoundedTime) {
  DeviceJob job(3, GetParam());
  std::atomic<int> ready{0};
  job.Run([&](int rank) {
    UserStream stream(rank);
    DeviceValues values({1}, stream);
    for (int step = 0; step < 3; ++step) {
      auto ticket = job[rank].Submit(values.AllReduce("step"));
      EXPECT_TRUE(stream.Use(*ticket).ok());
    }
    ++ready;
    while (ready < 3) std::this_thread::yield();
    if (rank == 2) {
      job.network().Kill(2);
    } else {
      const auto begin = std::chrono::steady_clock::now();
      const Status status = job[rank].Submit(values.AllReduce("step"))->Wait(nccl::kLong);
      EXPECT_EQ(status.code(), StatusCode::kAborted) << status.ToString();
      EXPECT_NE(status.message().find("rank 2"), std::string::npos) << status.ToString();
      EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(5));
    }
  });
}

}  // namespace
}  // namespace dad
