// Sums inside hosts and across them, on the local transport; device tensors on the recording fake.
#include "dad/hierarchy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <latch>
#include <thread>

#include "device_job.h"

namespace dad {
namespace {

TEST(HostPlanTest, HostsAndTheirLeadersInTheOrderOfRanks) {
  const std::vector<std::string> names{"b", "a", "b", "c", "a"};
  const HostPlan plan = PlanHosts(names);
  EXPECT_EQ(plan.hosts, (std::vector<std::vector<int>>{{0, 2}, {1, 4}, {3}}));
  EXPECT_EQ(plan.Leaders(), (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(plan.HostOf(4), (std::vector<int>{1, 4}));
  EXPECT_TRUE(plan.HostOf(5).empty());
}

Request OnHost(std::vector<float>& values, const std::string& name, ReduceOp op) {
  Request request;
  request.name = name;
  request.op = op;
  request.tensors.emplace_back();
  request.tensors[0].input.data = values.data();
  request.tensors[0].input.shape = {static_cast<int64_t>(values.size())};
  request.tensors[0].output = request.tensors[0].input;
  return request;
}

class HierarchyTest : public testing::TestWithParam<std::vector<std::string>> {
 protected:
  void SetUp() override { fake_gpu::Reset(); }
  int size() const { return static_cast<int>(GetParam().size()); }
};
INSTANTIATE_TEST_SUITE_P(Hosts, HierarchyTest,
                         testing::Values(std::vector<std::string>{"a", "a", "b", "b"},
                                         std::vector<std::string>{"a", "a", "a", "b"},
                                         std::vector<std::string>{"a", "b", "c"},
                                         std::vector<std::string>{"a", "a"}));

TEST_P(HierarchyTest, SumsAverageAndScaleOverAllRanks) {
  Options options;
  options.stall_warning_seconds = 3;  // names who is late
  DeviceJob job(size(), Wire::kStaged, options);
  job.Run([&](int rank) {
    auto made = Hierarchy::Make(job[rank], PlanHosts(GetParam()), nccl::kLong);
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    for (int step = 0; step < 5; ++step) {
      std::vector<float> a{1.0f + rank, 2}, b{4.0f * rank};
      auto sum = made.value()->Submit(OnHost(a, "a", ReduceOp::kSum));
      Request average = OnHost(b, "b", ReduceOp::kAverage);
      average.prescale = 2;
      average.postscale = 0.5;
      auto mean = made.value()->Submit(std::move(average));
      const Status status = sum->Wait(nccl::kLong);
      ASSERT_TRUE(status.ok()) << status.ToString();
      const Status scaled = mean->Wait(nccl::kLong);
      ASSERT_TRUE(scaled.ok()) << scaled.ToString() << " in step " << step;
      std::vector<float> c{static_cast<float>(rank)};
      EXPECT_TRUE(made.value()->Submit(OnHost(c, "c", ReduceOp::kMax))->Wait(nccl::kLong).ok());
      EXPECT_EQ(c[0], static_cast<float>(size() - 1));
      EXPECT_FLOAT_EQ(a[0], size() * (size() + 1) / 2.0f);
      EXPECT_FLOAT_EQ(a[1], 2.0f * size());
      EXPECT_FLOAT_EQ(b[0], 2.0f * (size() - 1));
    }
  });
}

TEST_P(HierarchyTest, AMethodIsForTheLeadersOnly) {
  DeviceJob job(size(), Wire::kStaged);
  job.Run([&](int rank) {
    auto made = Hierarchy::Make(job[rank], PlanHosts(GetParam()), nccl::kLong);
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    std::vector<float> values(500, 1.0f + rank);
    Request request = OnHost(values, "q", ReduceOp::kAverage);
    request.method = "int8";
    auto ticket = made.value()->Submit(std::move(request));
    const Status status = ticket->Wait(nccl::kLong);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_NEAR(values[3], (size() + 1) / 2.0f, 0.05f);
    EXPECT_EQ(values.front(), values.back());
  });
}

TEST(HierarchyDeviceTest, NcclInsideAHostAndOneRankOfEachAcross) {
  fake_gpu::Reset();
  {
    const std::vector<std::string> hosts{"a", "a", "b", "b"};
    DeviceJob job(4, Wire::kNccl);
    job.Run([&](int rank) {
      auto made = Hierarchy::Make(job[rank], PlanHosts(hosts), nccl::kLong);
      ASSERT_TRUE(made.ok()) << made.status().ToString();
      UserStream stream(rank);
      DeviceValues values({1.0f + rank, 10}, stream);
      Request request = values.AllReduce("g", ReduceOp::kSum);
      request.method = "int8";
      request.tensors[0].input.dtype = request.tensors[0].output.dtype = DType::kFloat32;
      auto ticket = made.value()->Submit(std::move(request));
      const Status used = stream.Use(*ticket);
      ASSERT_TRUE(used.ok()) << used.ToString();
      EXPECT_NEAR(values.data[0], 10, 0.3);
      EXPECT_NEAR(values.data[1], 40, 0.3);
      int copies = 0, sums = 0, broadcasts = 0;
      for (const auto& record : fake_gpu::Log(rank)) {
        copies += record.call == "cudaMemcpyAsync";
        sums += record.call == "ncclAllReduce";
        broadcasts += record.call == "ncclBroadcast";
      }
      EXPECT_EQ(sums, 1);
      EXPECT_EQ(broadcasts, 1);
      EXPECT_EQ(copies, rank % 2 == 0 ? 2 : 0);  // to the host and back: leaders only
    });
  }
  ReleasePassed();
  EXPECT_EQ(fake_gpu::LiveEvents(), 0);
  EXPECT_EQ(fake_gpu::LiveComms(), 0);
}

TEST(HierarchyDeviceTest, SquaresAreAddedUpBesideTheGradient) {
  fake_gpu::Reset();
  const std::vector<std::string> hosts{"a", "a", "b", "b"};
  DeviceJob job(4, Wire::kNccl);
  job.Run([&](int rank) {
    auto made = Hierarchy::Make(job[rank], PlanHosts(hosts), nccl::kLong);
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    UserStream stream(rank);
    // The same on all ranks: as one sample of a host it would not pass the test.
    DeviceValues gradient({2, -4}, stream), square({4, 16}, stream), result({0, 0}, stream);
    Request request = gradient.AllReduce("v", ReduceOp::kAverage);
    square.ready = result.ready = gradient.ready;
    request.method = "sparse;rule=vgc;alpha=1.5;variance=row;coding=word;layer=2x1";
    LayerInput layer;
    layer.dense = gradient.View();
    layer.dense_square = square.View();
    layer.output = result.View();
    request.tensors[0].layers = {layer};
    request.tensors[0].input.data = request.tensors[0].output.data = nullptr;
    auto ticket = made.value()->Submit(std::move(request));
    const Status used = stream.Use(*ticket);
    ASSERT_TRUE(used.ok()) << used.ToString();
    EXPECT_EQ(result.data, (std::vector<float>{2, -4}));
    EXPECT_EQ(square.data, (std::vector<float>{8, 32}));
  });
}

TEST(HierarchyDeviceTest, WhatHostsDisagreeOnIsAnErrorForAllOfThem) {
  DeviceJob job(4, Wire::kStaged);
  job.Run([&](int rank) {
    const std::vector<std::string> hosts{"a", "a", "a", "b"};
    auto made = Hierarchy::Make(job[rank], PlanHosts(hosts), nccl::kLong);
    ASSERT_TRUE(made.ok());
    std::vector<float> values{1};
    Request request = OnHost(values, "t", ReduceOp::kSum);
    request.prescale = rank < 3 ? 1 : 2;
    EXPECT_EQ(made.value()->Submit(std::move(request))->Wait(nccl::kLong).code(),
              StatusCode::kFailedPrecondition);
    values = {1};
    EXPECT_TRUE(made.value()->Submit(OnHost(values, "u", ReduceOp::kSum))->Wait(nccl::kLong).ok());
    EXPECT_EQ(values[0], 4);
  });
}

TEST(HierarchyTest, WhatAHostDisagreesOnIsAnErrorOnAllHosts) {
  DeviceJob job(4, Wire::kStaged);
  job.Run([&](int rank) {
    const std::vector<std::string> hosts{"a", "a", "b", "b"};
    auto made = Hierarchy::Make(job[rank], PlanHosts(hosts), nccl::kLong);
    ASSERT_TRUE(made.ok());
    std::vector<float> values(rank == 1 ? 2 : 1, 1.0f);
    const Status status =
        made.value()->Submit(OnHost(values, "t", ReduceOp::kSum))->Wait(nccl::kLong);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("\"t"), std::string::npos) << status.ToString();
    values = {1};
    EXPECT_TRUE(made.value()->Submit(OnHost(values, "t", ReduceOp::kSum))->Wait(nccl::kLong).ok());
    EXPECT_EQ(values[0], 4);
  });
}

TEST(HierarchyDeviceTest, RowsAreRefused) {
  DeviceJob job(2, Wire::kStaged);
  job.Run([&](int rank) {
    const std::vector<std::string> hosts{"a", "b"};
    auto made = Hierarchy::Make(job[rank], PlanHosts(hosts), nccl::kLong);
    ASSERT_TRUE(made.ok());
    UserStream stream(rank);
    DeviceValues values({1, 2}, stream);
    Request request = values.AllReduce("rows", ReduceOp::kSum);
    request.method = "low_rank;rank=1;layer=1x2";
    request.tensors[0].layers.emplace_back();
    request.tensors[0].layers[0].output = values.View();
    EXPECT_EQ(made.value()->Submit(std::move(request))->Wait(nccl::kLong).code(),
              StatusCode::kInvalidArgument);
  });
}

// A layer of 3 x 2 with a bias, as one row of factors; all ranks' gradients are multiples.
struct OneRow {
  explicit OneRow(int rank) : a{1, 2}, d{1.0f + rank, 0, 2.0f + 2 * rank} {}

  Request Make(const std::string& name, const std::string& method) {
    Request request = OnHost(weight, name, ReduceOp::kAverage);
    request.method = method;
    request.tensors[0].output = {};
    request.tensors[0].input = {};
    request.tensors[0].input.shape = {9};
    LayerInput layer;
    RowsSegment row;
    row.a = View(a, {1, 2});
    row.d = View(d, {1, 3});
    layer.rows = {row};
    layer.output = View(weight, {3, 2});
    layer.output_bias = View(bias, {3});
    request.tensors[0].layers = {layer};
    return request;
  }
  static TensorView View(std::vector<float>& values, Shape shape) {
    TensorView view;
    view.data = values.data();
    view.shape = std::move(shape);
    return view;
  }

  std::vector<float> a, d;
  std::vector<float> weight = std::vector<float>(6), bias = std::vector<float>(3);
};

class LayerHierarchyTest : public ::testing::Test {
 protected:
  static void OnTwoHosts(const std::function<void(int rank, Hierarchy& hierarchy)>& body) {
    DeviceJob job(4, Wire::kStaged);
    job.Run([&](int rank) {
      const std::vector<std::string> hosts{"a", "a", "b", "b"};
      auto made = Hierarchy::Make(job[rank], PlanHosts(hosts), nccl::kLong);
      ASSERT_TRUE(made.ok()) << made.status().ToString();
      body(rank, *made.value());
    });
  }
};

TEST_F(LayerHierarchyTest, FactorsAndWordsCrossHosts) {
  OnTwoHosts([](int rank, Hierarchy& hierarchy) {
    for (const char* method : {"low_rank;rank=1;wire=fp32;owner=1;layer=3x2:bias",
                               "sparse;rule=topk;ratio=0.9;layer=3x2:bias"}) {
      for (int step = 0; step < 3; ++step) {
        OneRow row(rank);
        const Status status = hierarchy.Submit(row.Make(method, method))->Wait(nccl::kLong);
        ASSERT_TRUE(status.ok()) << status.ToString();
        EXPECT_NEAR(row.weight[5], 10, 1e-5) << method;  // the mean of 4, 8, 12, 16
        if (method[0] == 's') continue;                  // not all of it is sent
        EXPECT_NEAR(row.weight[0], 2.5, 1e-5);
        EXPECT_NEAR(row.bias[2], 5, 1e-5);
      }
    }
  });
}

TEST_F(LayerHierarchyTest, RanksOfAHostAreSamplesOfTheirOwn) {
  OnTwoHosts([](int, Hierarchy& hierarchy) {
    OneRow row(0);  // the same on all ranks: two samples of a host agree
    const auto ticket = hierarchy.Submit(
        row.Make("v", "sparse;rule=vgc;alpha=1.5;variance=row;coding=word;layer=3x2:bias"));
    const Status status = ticket->Wait(nccl::kLong);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(row.weight, (std::vector<float>{1, 2, 0, 0, 2, 4}));
    EXPECT_EQ(row.bias, (std::vector<float>{1, 0, 2}));
  });
}

TEST_F(LayerHierarchyTest, ARankHasAWeightOfItsOwn) {
  OnTwoHosts([](int rank, Hierarchy& hierarchy) {
    OneRow row(0);
    Request layer = row.Make("w", "low_rank;rank=1;wire=fp32;combine=gather;layer=3x2:bias");
    layer.op = ReduceOp::kSum;
    layer.tensors[0].scale = rank;
    std::vector<float> values(600, 1);
    Request plain = OnHost(values, "p", ReduceOp::kSum);
    plain.method = "int8";
    plain.tensors[0].scale = rank;
    const auto of_layer = hierarchy.Submit(std::move(layer));
    const auto of_plain = hierarchy.Submit(std::move(plain));
    ASSERT_TRUE(of_layer->Wait(nccl::kLong).ok());
    ASSERT_TRUE(of_plain->Wait(nccl::kLong).ok());
    EXPECT_NEAR(row.weight[5], 24, 1e-4);  // 0 + 4 + 8 + 12
    EXPECT_NEAR(values[599], 6, 0.1);
  });
}

TEST_F(LayerHierarchyTest, WhatAMethodFoundIsForAllRanksToKnow) {
  OnTwoHosts([](int rank, Hierarchy& hierarchy) {
    OneRow row(rank);
    if (rank == 3) row.d[0] = INFINITY;
    const auto ticket =
        hierarchy.Submit(row.Make("n", "sparse;rule=topk;ratio=0.9;layer=3x2:bias"));
    ASSERT_TRUE(ticket->Wait(nccl::kLong).ok());
    EXPECT_EQ(ticket->value() & kNotFinite, kNotFinite);
    EXPECT_EQ(ticket->value() >> kRankShift, 3);  // 1 + rank 2, which leads the host
    EXPECT_TRUE(std::isnan(row.weight[5]));
  });
}

// The engine that users get with the option: 2 hosts of 2 ranks each.
class HierarchicalEngineTest : public ::testing::Test {
 protected:
  static void OnFourRanks(const std::function<void(int rank, Engine& engine)>& body) {
    LocalNetwork network(4);
    std::latch all_are_through(4);  // one that leaves early fails others' last join
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] {
        World world;
        world.rank = rank;
        world.size = 4;
        world.hostname = rank < 2 ? "a" : "b";
        Options options;
        options.hierarchical_allreduce = rank == 0;  // which counts
        auto engine = Engine::CreateOn(network.Connect(rank), world, options);
        ASSERT_TRUE(engine.ok()) << engine.status().ToString();
        body(rank, *engine.value());
        all_are_through.arrive_and_wait();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

TEST_F(HierarchicalEngineTest, UsersSeeNothingOfTheSteps) {
  OnFourRanks([](int rank, Engine& engine) {
    EXPECT_EQ(engine.ProcessSetIds(), std::vector<int>{0});
    Request add;
    add.kind = OpKind::kAddProcessSet;
    add.name = "mine";
    add.ranks = {0, 1};  // as a host has
    const auto added = engine.Submit(std::move(add));
    const Status status = added->Wait(nccl::kLong);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(engine.ProcessSetIds().size(), 2u);
    std::vector<float> values(1000, 1.0f + rank);
    ASSERT_TRUE(engine.Submit(OnHost(values, "x", ReduceOp::kSum))->Wait(nccl::kLong).ok());
    EXPECT_EQ(values[999], 10);
    const Stats stats = engine.GetStats();
    ASSERT_EQ(stats.tensors.size(), 1u);
    EXPECT_EQ(stats.tensors[0].name, "x");
    EXPECT_GT(stats.tensors[0].wire_bytes_sent, 3000);
    std::vector<float> most{1.0f + rank};
    ASSERT_TRUE(engine.Submit(OnHost(most, "max", ReduceOp::kMax))->Wait(nccl::kLong).ok());
    EXPECT_EQ(most[0], 4);
  });
}

Request Join() {
  Request join;
  join.kind = OpKind::kJoin;
  join.name = "join";
  return join;
}

TEST_F(HierarchicalEngineTest, AHostWhoseLeaderHasJoinedStillCounts) {
  OnFourRanks([](int rank, Engine& engine) {
    for (const int first : {0, 1, 2, 3}) {
      if (rank != first) {
        std::vector<float> values(100, 1.0f + rank), quantised(600, 4.0f);
        const auto sum = engine.Submit(OnHost(values, "x", ReduceOp::kAverage));
        Request request = OnHost(quantised, "q", ReduceOp::kAverage);
        request.method = "int8;bucket=512;feedback=1";
        const auto by_method = engine.Submit(std::move(request));
        const Status status = sum->Wait(nccl::kLong);
        EXPECT_TRUE(status.ok()) << status.ToString();
        EXPECT_FLOAT_EQ(values[99], (10 - 1 - first) / 4.0f) << first;
        const Status quick = by_method->Wait(nccl::kLong);
        EXPECT_TRUE(quick.ok()) << quick.ToString();
        EXPECT_NEAR(quantised[599], 3, 1e-5) << first;
        EXPECT_EQ(by_method->value(), 0);
        OneRow row(rank);
        Request layer = row.Make("l", "low_rank;rank=1;wire=fp32;combine=gather;layer=3x2:bias");
        layer.tensors[0].layers[0].output.shape = {2, 3};
        layer.tensors[0].layers[0].transposed = true;
        EXPECT_TRUE(engine.Submit(std::move(layer))->Wait(nccl::kLong).ok());
        const float of_rows = (10 - 1 - first) / 4.0f;
        for (size_t i = 0; i < 6; ++i) {
          const std::vector<float> one{1, 0, 2, 2, 0, 4};
          EXPECT_NEAR(row.weight[i], of_rows * one[i], 1e-4) << i << ", " << first;
        }
        EXPECT_NEAR(row.bias[2], 2 * of_rows, 1e-4);
        std::vector<float> most{1.0f + rank};
        Request scaled = OnHost(most, "m", ReduceOp::kMax);
        scaled.prescale = 0.5;
        EXPECT_TRUE(engine.Submit(std::move(scaled))->Wait(nccl::kLong).ok());
        EXPECT_EQ(most[0], first == 3 ? 1.5f : 2.0f);
        std::vector<float> product{2};
        const Status products =
            engine.Submit(OnHost(product, "p", ReduceOp::kProduct))->Wait(nccl::kLong);
        EXPECT_EQ(products.ok(), first % 2 == 1) << products.ToString();
        if (products.ok()) EXPECT_EQ(product[0], 8);
      }
      const auto joined = engine.Submit(Join());
      if (rank == first) {
        EXPECT_EQ(engine.Submit(Join())->Wait(nccl::kLong).code(), StatusCode::kInvalidArgument);
      }
      const Status status = joined->Wait(nccl::kLong);
      EXPECT_TRUE(status.ok()) << status.ToString();
      EXPECT_NE(joined->value(), first);
    }
  });
}

// A rank joins anew while others still hear that all have joined.
TEST_F(HierarchicalEngineTest, JoinsMayFollowEachOther) {
  OnFourRanks([](int rank, Engine& engine) {
    for (int round = 0; round < 60; ++round) {
      const int first = round % 4;
      if (rank != first) {
        std::vector<float> values(100, 1.0f + rank);
        const Status status =
            engine.Submit(OnHost(values, "x", ReduceOp::kSum))->Wait(std::chrono::seconds(20));
        ASSERT_TRUE(status.ok()) << round << ": " << status.ToString();
        EXPECT_EQ(values[0], 9 - first);
      }
      ASSERT_TRUE(engine.Submit(Join())->Wait(std::chrono::seconds(20)).ok()) << round;
    }
  });
}

TEST_F(HierarchicalEngineTest, ThoseWhoAreLeftAgreeOnAnError) {
  OnFourRanks([](int rank, Engine& engine) {
    for (const int first : {0, 3}) {
      if (rank != first) {
        std::vector<float> values(rank == 1 ? 2 : 1, 1.0f);
        EXPECT_EQ(engine.Submit(OnHost(values, "t", ReduceOp::kSum))->Wait(nccl::kLong).code(),
                  StatusCode::kFailedPrecondition);
        values = {1};
        EXPECT_TRUE(engine.Submit(OnHost(values, "t", ReduceOp::kSum))->Wait(nccl::kLong).ok());
        EXPECT_EQ(values[0], 3);
      }
      EXPECT_TRUE(engine.Submit(Join())->Wait(nccl::kLong).ok());
    }
  });
}

TEST_F(HierarchicalEngineTest, WhatAMethodKeepsLiesWithTheLeaders) {
  OnFourRanks([](int rank, Engine& engine) {
    EXPECT_EQ(engine.Hosts(), (std::vector<std::vector<int>>{{0, 1}, {2, 3}}));
    const bool leads = rank % 2 == 0;
    // Two elements of a thousand are sent, by each host the one that is largest there.
    const auto send = [&](float first) {
      std::vector<float> values(1000, 0.25f);
      values[0] = first;
      Request request = OnHost(values, "kept", ReduceOp::kAverage);
      request.tensors[0].layers.emplace_back();
      request.tensors[0].layers[0].dense = request.tensors[0].layers[0].output =
          request.tensors[0].input;
      request.tensors[0].input.data = request.tensors[0].output.data = nullptr;
      request.method = "sparse;rule=topk;ratio=0.001;feedback=1;layer=1000x1";
      const Status status = engine.Submit(std::move(request))->Wait(nccl::kLong);
      EXPECT_TRUE(status.ok()) << status.ToString();
      return values;
    };
    EXPECT_EQ(send(8.0f)[0], 8);
    const std::vector<StateTensor> kept = engine.ExportState(0, 0, "kept");
    EXPECT_EQ(kept.empty(), !leads);
    engine.DropStates(0, 0);
    EXPECT_TRUE(engine.ExportState(0, 0, "kept").empty());
    // Of another rank, which has none, nothing is taken.
    engine.ImportState(0, 0, "kept", kept);
    const std::vector<float> after = send(8.0f);
    EXPECT_EQ(after[0], 8);
    EXPECT_EQ(after[1], 0);
    engine.ReturnLast(0, 0);
    EXPECT_EQ(send(0.0f)[0], 8);          // once more
    EXPECT_EQ(send(0.0f)[1], 0.25f * 4);  // four steps of it have gathered
    const Stats stats = engine.GetStats();
    ASSERT_EQ(stats.tensors.size(), 1u);
    EXPECT_EQ(stats.tensors[0].name, "kept");
    EXPECT_EQ(stats.tensors[0].hosts_bytes_sent > 0, leads);
    EXPECT_LT(stats.tensors[0].hosts_bytes_sent, 500);
  });
}

TEST_F(HierarchicalEngineTest, TensorsMayHaveTheNamesOfSteps) {
  OnFourRanks([](int rank, Engine& engine) {
    const std::vector<std::string> names{"x", "x.host", "x.hosts", "x.down", "x.orphans"};
    std::vector<std::vector<float>> values(names.size(), {1.0f + rank});
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (size_t i = 0; i < names.size(); ++i) {
      tickets.push_back(engine.Submit(OnHost(values[i], names[i], ReduceOp::kSum)));
    }
    for (size_t i = 0; i < names.size(); ++i) {
      const Status status = tickets[i]->Wait(nccl::kLong);
      ASSERT_TRUE(status.ok()) << status.ToString();
      EXPECT_EQ(values[i][0], 10);
    }
    const Stats stats = engine.GetStats();
    ASSERT_EQ(stats.tensors.size(), names.size());
    for (const TensorStats& tensor : stats.tensors) {
      EXPECT_EQ(tensor.steps, 1) << tensor.name;
      EXPECT_EQ(tensor.hosts_bytes_sent > 0, rank % 2 == 0) << tensor.name;
    }
  });
}

// With one rank per host steps are taken between all ranks, where rows go, too.
TEST(HierarchyTest, ASumAcrossHostsIsNotTakenForRowsOfItsName) {
  DeviceJob job(2, Wire::kStaged);
  job.Run([&](int rank) {
    const std::vector<std::string> hosts{"a", "b"};
    auto made = Hierarchy::Make(job[rank], PlanHosts(hosts), nccl::kLong);
    ASSERT_TRUE(made.ok());
    std::vector<float> sum{1.0f + rank};
    OneRow row(rank);
    const auto first = made.value()->Submit(OnHost(sum, "x", ReduceOp::kSum));
    const auto second =
        job[rank].Submit(row.Make("x.hosts", "factor;wire=fp32;rows=1;layer=3x2:bias"));
    const Status status = first->Wait(nccl::kLong);
    EXPECT_TRUE(status.ok()) << status.ToString();
    const Status of_rows = second->Wait(nccl::kLong);
    EXPECT_TRUE(of_rows.ok()) << of_rows.ToString();
    EXPECT_EQ(sum[0], 3);
  });
}

TEST_F(HierarchicalEngineTest, ExactFactorsGoBetweenAllRanks) {
  OnFourRanks([](int rank, Engine& engine) {
    OneRow row(rank);
    ASSERT_TRUE(engine.Submit(row.Make("f", "factor;wire=fp32;rows=1;layer=3x2:bias"))
                    ->Wait(nccl::kLong)
                    .ok());
    EXPECT_FLOAT_EQ(row.weight[5], 10);
    const Stats stats = engine.GetStats();
    ASSERT_EQ(stats.tensors.size(), 1u);
    EXPECT_EQ(stats.tensors[0].hosts_bytes_sent, 0);
  });
}

}  // namespace
}  // namespace dad
