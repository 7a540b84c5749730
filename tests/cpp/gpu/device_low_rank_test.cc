// rank-dAD of a layer on devices: nothing is lost, replicas are bit-equal, and with an exact wire
// the host's results to rounding. On the recording fake, with its cuBLAS and the kernels emulated.
// No GPU has run any of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "method_job.h"

namespace dad {
namespace {

constexpr int64_t kOut = 24, kIn = 31;

class DeviceLowRankTest : public MethodTest {
 protected:
  static LayerJob<float> Job(const std::string& options, bool bias, int ranks) {
    LayerJob<float> job;
    job.method = "low_rank;rank=3;" + options + ";layer=" + std::to_string(kOut) + "x" +
                 std::to_string(kIn) + (bias ? ":bias" : "");
    job.out = kOut;
    job.in = kIn;
    job.bias = bias;
    job.ranks = ranks;
    job.steps = 4;
    job.bring = [=](int rank, int step, LayerStep<float>& mine) {
      const auto seed = static_cast<uint32_t>(100 * rank + step);
      if ((rank + step) % 2 == 0) {  // rows or a gradient, or both
        mine.rows = 5;
        mine.a = Normal<float>(5 * kIn, seed);
        mine.d = Normal<float>(5 * kOut, seed + 50);
      }
      if (rank == 0 || mine.rows == 0) {
        mine.dense = Normal<float>(kOut * kIn, seed + 70);
        if (bias) mine.dense_bias = Normal<float>(kOut, seed + 80);
      }
    };
    return job;
  }

  // The gradient that a rank brought, in double.
  static std::vector<double> Gradient(const LayerJob<float>& job, int rank, int step) {
    LayerStep<float> mine;
    job.bring(rank, step, mine);
    const int64_t columns = kIn + (job.bias ? 1 : 0);
    std::vector<double> g(static_cast<size_t>(kOut * columns));
    for (int64_t o = 0; o < kOut; ++o) {
      for (int64_t i = 0; i < columns; ++i) {
        double& to = g[static_cast<size_t>(i < kIn ? o * kIn + i : kOut * kIn + o)];
        if (!mine.dense.empty()) {
          to += i < kIn ? mine.dense[static_cast<size_t>(o * kIn + i)]
                        : mine.dense_bias[static_cast<size_t>(o)];
        }
        for (int64_t r = 0; r < mine.rows; ++r) {
          to += double{mine.d[static_cast<size_t>(r * kOut + o)]} *
                (i < kIn ? mine.a[static_cast<size_t>(r * kIn + i)] : 1.0f);
        }
      }
    }
    return g;
  }

  static std::vector<float> Values(const std::vector<StateTensor>& state, const std::string& name) {
    for (const StateTensor& tensor : state) {
      if (tensor.name != name) continue;
      std::vector<float> values(tensor.bytes.size() / sizeof(float));
      std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
      return values;
    }
    return {};
  }

  // What a side still has: E less what is pending. Weight, then bias, as E lies.
  static void AddKept(const std::vector<StateTensor>& state, const std::string& side, double scale,
                      int64_t columns, std::vector<double>& sum) {
    const std::vector<float> e = Values(state, side + "residual");
    for (size_t i = 0; i < e.size(); ++i) sum[i] += scale * e[i];
    const std::vector<float> u = Values(state, side + "pending_d");
    const std::vector<float> v = Values(state, side + "pending_a");
    for (int64_t k = 0; k < static_cast<int64_t>(u.size()) / kOut; ++k) {
      for (int64_t o = 0; o < kOut; ++o) {
        for (int64_t i = 0; i < columns; ++i) {
          sum[static_cast<size_t>(i < kIn ? o * kIn + i : kOut * kIn + o)] -=
              scale * u[static_cast<size_t>(k * kOut + o)] *
              v[static_cast<size_t>(k * columns + i)];
        }
      }
    }
  }

  // Σ_t M + E_o + (1/W) Σ_w E_w = Σ_t mean_w G_w.
  static void ExpectNothingLost(const LayerJob<float>& job, const LayerJob<float>::Outcome& mine,
                                const std::vector<int>& skipped = {}) {
    const int64_t columns = kIn + (job.bias ? 1 : 0);
    std::vector<double> wanted(static_cast<size_t>(kOut * columns)), sum(wanted.size());
    for (int step = 0; step < job.steps; ++step) {
      if (std::find(skipped.begin(), skipped.end(), step) != skipped.end()) continue;
      const auto s = static_cast<size_t>(step);
      for (int rank = 0; rank < job.ranks; ++rank) {
        const std::vector<double> g = Gradient(job, rank, step);
        for (size_t i = 0; i < g.size(); ++i) wanted[i] += g[i] / job.ranks;
        const auto r = static_cast<size_t>(rank);
        ExpectSameBits(mine.weight[r][s], mine.weight[0][s], "replicas");
        ExpectSameBits(mine.bias[r][s], mine.bias[0][s], "replicas");
      }
      for (size_t i = 0; i < mine.weight[0][s].size(); ++i) sum[i] += mine.weight[0][s][i];
      for (size_t i = 0; i < mine.bias[0][s].size(); ++i) {
        sum[static_cast<size_t>(kOut * kIn) + i] += mine.bias[0][s][i];
      }
    }
    for (const auto& state : mine.state) {
      AddKept(state, "rank_", 1.0 / job.ranks, columns, sum);
      AddKept(state, "owner_", 1.0, columns, sum);
    }
    for (size_t i = 0; i < sum.size(); ++i) ASSERT_NEAR(sum[i], wanted[i], 1e-4) << i;
  }
};

TEST_F(DeviceLowRankTest, NothingIsLostByAnyWireAndCombination) {
  for (const char* combine : {"combine=owner;owner=1", "combine=gather", "combine=power;owner=2"}) {
    for (const char* wire : {";wire=int4", ";wire=int8", ";wire=bf16", ";wire=fp32"}) {
      for (const bool bias : {false, true}) {
        SCOPED_TRACE(std::string(combine) + wire);
        fake_gpu::Reset();
        const LayerJob<float> job = Job(std::string(combine) + wire, bias, 3);
        ExpectNothingLost(job, job.Run(Methods::kOnDevice, true));
        EXPECT_GT(fake_gpu::Count("cublasSgemm"), 0);
      }
    }
  }
}

TEST_F(DeviceLowRankTest, IsThatOfTheHostToRounding) {
  for (const char* options :
       {"wire=fp32;combine=owner", "wire=fp32;combine=gather;iterations=2",
        "wire=fp32;combine=owner;energy=0.5", "wire=fp32;tol=0.9", "wire=fp32;feedback=none",
        "wire=fp32;feedback=none;combine=gather;energy=0.5",
        "wire=fp32;feedback=none;combine=owner;owner=1;iterations=3", "combine=power",
        "combine=power;owner=1"}) {
    SCOPED_TRACE(options);
    LayerJob<float> job = Job(options, true, 2);
    job.postscale = 0.5;
    const auto wanted = job.Run(Methods::kOnHost, false);
    const auto mine = job.Run(Methods::kOnDevice, true);
    EXPECT_EQ(mine.value, wanted.value);
    for (size_t s = 0; s < wanted.weight[0].size(); ++s) {
      for (size_t i = 0; i < wanted.weight[0][s].size(); ++i) {
        ASSERT_NEAR(mine.weight[1][s][i], wanted.weight[1][s][i], 5e-3) << "step " << s;
      }
    }
    EXPECT_EQ(mine.stats[0].tensors[0].wire_bytes_sent, wanted.stats[0].tensors[0].wire_bytes_sent);
    EXPECT_EQ(mine.stats[0].tensors[0].effective, wanted.stats[0].tensors[0].effective);
    EXPECT_GT(fake_gpu::Count("cublasSgemm"), 0);
    ASSERT_EQ(mine.state[0].size(), wanted.state[0].size());
    for (size_t t = 0; t < wanted.state[0].size(); ++t) {
      EXPECT_EQ(mine.state[0][t].name, wanted.state[0][t].name);
      EXPECT_EQ(mine.state[0][t].shape, wanted.state[0][t].shape);
    }
  }
}

// Few rows are not formed to a gradient, many are.
TEST_F(DeviceLowRankTest, WithoutFeedbackItIsThatOfTheHostForFewAndManyRows) {
  for (const int64_t rows : {1, 7, 40}) {
    for (const char* options : {"wire=fp32;feedback=none;combine=gather", "combine=power"}) {
      SCOPED_TRACE(options + std::string(", rows ") + std::to_string(rows));
      fake_gpu::Reset();
      LayerJob<float> job = Job(options, true, 3);
      job.bring = [rows](int rank, int step, LayerStep<float>& mine) {
        const auto seed = static_cast<uint32_t>(100 * rank + step);
        mine.rows = rows;
        mine.a = Normal<float>(rows * kIn, seed);
        mine.d = Normal<float>(rows * kOut, seed + 50);
        // Of directions that are told apart.
        for (size_t i = 0; i < mine.d.size(); ++i) {
          mine.d[i] *= std::pow(0.4f, static_cast<float>(i / kOut % 7));
        }
      };
      const auto wanted = job.Run(Methods::kOnHost, false);
      const auto mine = job.Run(Methods::kOnDevice, true);
      EXPECT_EQ(mine.value, wanted.value);
      EXPECT_EQ(fake_gpu::Count("dad_cuda_widen_rows") > 0,
                rows < kOut && options != std::string("combine=power"));
      for (size_t s = 0; s < wanted.weight[0].size(); ++s) {
        for (size_t i = 0; i < wanted.weight[0][s].size(); ++i) {
          ASSERT_NEAR(mine.weight[1][s][i], wanted.weight[1][s][i], 5e-3) << "step " << s;
        }
        ExpectSameBits(mine.bias[2][s], mine.bias[0][s], "replicas");
      }
      EXPECT_EQ(mine.stats[0].tensors[0].wire_bytes_sent,
                wanted.stats[0].tensors[0].wire_bytes_sent);
      for (size_t r = 0; r < 3; ++r) {
        ASSERT_EQ(mine.state[r].size(), wanted.state[r].size());
        for (size_t t = 0; t < mine.state[r].size(); ++t) {
          EXPECT_EQ(mine.state[r][t].name, wanted.state[r][t].name);
        }
      }
    }
  }
}

TEST_F(DeviceLowRankTest, WhatIsNotFiniteGivesNaNToAllAndChangesNoState) {
  for (const char* options : {"wire=int8;combine=owner;owner=2", "combine=power;owner=2"}) {
    SCOPED_TRACE(options);
    LayerJob<float> job = Job(options, true, 3);
    const auto bring = job.bring;
    job.bring = [bring](int rank, int step, LayerStep<float>& mine) {
      bring(rank, step, mine);
      if (rank == 1 && step == 2) mine.scale = std::numeric_limits<float>::infinity();
    };
    const auto mine = job.Run(Methods::kOnDevice, true);
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_TRUE(std::isnan(mine.weight[r][2][0]));
      EXPECT_EQ(mine.value[r][2] & kNotFinite, kNotFinite);
      EXPECT_FALSE(std::isnan(mine.weight[r][3][0]));
    }
    ExpectNothingLost(job, mine, {2});
  }
}

class DeviceLowRankStateTest : public DeviceLowRankTest,
                               public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, DeviceLowRankStateTest,
                         testing::Values("wire=int4;combine=owner", "combine=power"));

TEST_P(DeviceLowRankStateTest, IsSavedRestoredAndReturned) {
  LayerJob<float> job = Job(GetParam(), true, 2);
  const auto straight = job.Run(Methods::kOnDevice, true);
  job.then = [](int, int step, const LayerStep<float>&, Ticket&, Engine& engine) {
    if (step != 1) return;
    std::vector<StateTensor> saved = engine.ExportState(0, 3, "layer");
    engine.DropStates(0, 3);
    engine.ImportState(0, 3, "layer", std::move(saved));
  };
  const auto resumed = job.Run(Methods::kOnDevice, true);
  EXPECT_EQ(resumed.weight, straight.weight);
  EXPECT_EQ(resumed.bias, straight.bias);
  // The mean of step 2 is not used: it waits again.
  job.then = [](int, int step, const LayerStep<float>&, Ticket&, Engine& engine) {
    if (step == 2) engine.ReturnLast(0, 3);
  };
  auto returned = job.Run(Methods::kOnDevice, true);
  for (auto& rank : returned.weight) std::fill(rank[2].begin(), rank[2].end(), 0.0f);
  for (auto& rank : returned.bias) std::fill(rank[2].begin(), rank[2].end(), 0.0f);
  ExpectNothingLost(job, returned);
}

TEST_F(DeviceLowRankTest, ANewOwnerLosesNothing) {
  LayerJob<float> job = Job("wire=int8;combine=owner", true, 3);
  DeviceJob engines(3, Wire::kStaged, {}, {}, Methods::kOnDevice);
  LayerJob<float>::Outcome mine;
  mine.weight.resize(3);
  mine.bias.resize(3);
  mine.state.resize(3);
  engines.Run([&](int rank) {
    const auto r = static_cast<size_t>(rank);
    UserStream stream(rank);
    for (int step = 0; step < job.steps; ++step) {
      LayerJob<float> planned = job;
      planned.method = "low_rank;rank=3;wire=int8;owner=" + std::to_string(step < 2 ? 0 : 2) +
                       ";layer=" + std::to_string(kOut) + "x" + std::to_string(kIn) + ":bias";
      LayerStep<float> brought;
      job.bring(rank, step, brought);
      const DeviceEvent ready = stream.Record();
      Request request = planned.RequestOf(brought, rank, ready.get());
      request.keep_alive = ready;
      auto ticket = engines[rank].Submit(std::move(request));
      const Status used = stream.Use(*ticket);
      ASSERT_TRUE(used.ok()) << used.ToString();
      mine.weight[r].push_back(brought.output);
      mine.bias[r].push_back(brought.output_bias);
    }
    mine.state[r] = engines[rank].ExportState(0, 3, "layer");
  });
  EXPECT_TRUE(Values(mine.state[0], "owner_residual").empty());
  EXPECT_FALSE(Values(mine.state[2], "owner_residual").empty());
  ExpectNothingLost(job, mine);
}

class DeviceLowRankJoinTest : public DeviceLowRankTest,
                              public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, DeviceLowRankJoinTest,
                         testing::Values("wire=fp32;combine=owner;owner=1",
                                         "combine=power;owner=1"));

TEST_P(DeviceLowRankJoinTest, AJoinedRankServesAsOwnerAndIndexedRowsAreTaken) {
  DeviceJob job(3, Wire::kStaged, {}, {}, Methods::kOnDevice);
  const LayerJob<float> layer = Job(GetParam(), false, 3);
  job.Run([&](int rank) {
    UserStream stream(rank);
    if (rank != 1) {
      LayerStep<float> mine;
      std::vector<int64_t> index{3, 20, 3};  // a gradient of rank 2
      std::vector<float> x(3 * kIn, 1.5f);
      for (int64_t i = 0; i < kIn; ++i)
        x[static_cast<size_t>(kIn + i)] = 0.1f * static_cast<float>(i);
      const DeviceEvent ready = stream.Record();
      Request request = layer.RequestOf(mine, rank, ready.get());
      request.keep_alive = ready;
      LayerInput& input = request.tensors[0].layers[0];
      IndexedSegment& segment = input.indexed.emplace_back();
      segment.index = segment.x = input.output;
      segment.index.data = index.data();
      segment.index.dtype = DType::kInt64;
      segment.index.shape = {3};
      segment.x.data = x.data();
      segment.x.shape = {3, kIn};
      auto ticket = job[rank].Submit(std::move(request));
      const Status used = stream.Use(*ticket);
      ASSERT_TRUE(used.ok()) << used.ToString();
      EXPECT_NEAR(mine.output[3 * kIn + 7], 2.0f, 1e-4);  // two ranks of three, twice 1.5
      EXPECT_NEAR(mine.output[20 * kIn + 10], 2.0f / 3, 1e-4);
      EXPECT_NEAR(mine.output[5], 0.0f, 1e-4);
    }
    Request join;
    join.kind = OpKind::kJoin;
    join.name = "join";
    EXPECT_TRUE(job[rank].Submit(std::move(join))->Wait(nccl::kLong).ok());
  });
}

TEST_F(DeviceLowRankTest, OnlyFactorsCrossToTheHostAndNothingWaits) {
  LayerJob<float> job = Job("wire=int4;combine=owner", true, 2);
  job.Run(Methods::kOnDevice, true);
  int large = 0;
  for (const auto& record : fake_gpu::Log(1)) {
    EXPECT_EQ(record.call.find("Synchronize"), std::string::npos);
    large += record.call == "cudaMemcpyAsync" && record.count >= kOut * (kIn + 1) * sizeof(float);
  }
  // Copies of E within the device, and the last for ExportState: rank 1 is not the owner.
  EXPECT_EQ(large, job.steps - 1 + 1);
}

TEST_F(DeviceLowRankTest, NoPassAsksTheHost) {
  const auto count = [](const char* iterations, const char* call) {
    fake_gpu::Reset();
    Job(std::string("wire=int8;combine=gather;iterations=") + iterations, true, 2)
        .Run(Methods::kOnDevice, true);
    return fake_gpu::Count(call);
  };
  EXPECT_EQ(count("1", "cudaMemcpyAsync"), count("5", "cudaMemcpyAsync"));
  EXPECT_LT(count("1", "dad_cuda_principal"), count("5", "dad_cuda_principal"));
}

}  // namespace
}  // namespace dad
