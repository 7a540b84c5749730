// Sums inside hosts and across them, on the local transport; device tensors on the recording fake.
#include "dad/hierarchy.h"

#include <gtest/gtest.h>

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

TEST(HierarchyDeviceTest, RowsAreRefused) {
  DeviceJob job(2, Wire::kStaged);
  job.Run([&](int rank) {
    const std::vector<std::string> hosts{"a", "b"};
    auto made = Hierarchy::Make(job[rank], PlanHosts(hosts), nccl::kLong);
    ASSERT_TRUE(made.ok());
    std::vector<float> values{1};
    Request request = OnHost(values, "rows", ReduceOp::kSum);
    request.tensors[0].layers.emplace_back();
    request.tensors[0].layers[0].rows.emplace_back();
    EXPECT_EQ(made.value()->Submit(std::move(request))->Wait(nccl::kLong).code(),
              StatusCode::kInvalidArgument);
  });
}

}  // namespace
}  // namespace dad
