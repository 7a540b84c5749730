// The sparse methods of device tensors, against the host's exchange bit for bit: on the recording
// fake, with the kernels emulated. No GPU has run any of it.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "exchange/device/bench.h"
#include "exchange/exchange.h"
#include "exchange/feedback/state_store.h"
#include "method_job.h"

namespace dad {
namespace {

class DeviceSparseTest : public MethodTest {};

std::string Layer(int64_t out, int64_t in, bool bias) {
  return ";layer=" + std::to_string(out) + "x" + std::to_string(in) + (bias ? ":bias" : "");
}

template <typename T>
LayerJob<T> Job(const std::string& options, int64_t out, int64_t in, bool bias, int ranks) {
  LayerJob<T> job;
  job.method = "sparse;" + options + Layer(out, in, bias);
  job.out = out;
  job.in = in;
  job.bias = bias;
  job.ranks = ranks;
  job.bring = [=](int rank, int step, LayerStep<T>& mine) {
    const auto seed = static_cast<uint32_t>(100 * rank + step);
    mine.dense = Normal<T>(out * in, seed);
    // Some large ones, so that something passes and not everything does.
    for (size_t i = 0; i < mine.dense.size(); i += 11) mine.dense[i] *= T(9);
    if (bias) mine.dense_bias = Normal<T>(out, seed + 50);
    mine.square.resize(mine.dense.size());
    for (size_t i = 0; i < mine.dense.size(); ++i) {
      mine.square[i] = mine.dense[i] * mine.dense[i] * (i % 11 == 0 ? T(0.5) : T(3));
    }
    if (bias) mine.bias_square = mine.dense_bias;
    for (T& x : mine.bias_square) x *= x;
  };
  return job;
}

template <typename T>
void ExpectAsOnTheHost(const LayerJob<T>& job) {
  const auto wanted = job.Run(Methods::kOnHost, false);
  EXPECT_EQ(fake_gpu::Count("cudaMemcpyAsync"), 0);
  const auto mine = job.Run(Methods::kOnDevice, true);
  EXPECT_GT(fake_gpu::Count("cudaMemcpyAsync"), 0);
  ExpectSame<T>(mine, wanted);
}

TEST_F(DeviceSparseTest, GivesTheBitsOfTheHostForEveryRuleAndCoding) {
  for (const char* rule : {"rule=vgc", "rule=vgc;feedback=1", "rule=vgc_strom;tau=2", "rule=strom",
                           "rule=strom;tau_absolute=0.7", "rule=vgc_strom;tau_absolute=0.5"}) {
    for (const char* coding : {";coding=word", ";coding=rice"}) {
      SCOPED_TRACE(std::string(rule) + coding);
      fake_gpu::Reset();
      ExpectAsOnTheHost(Job<float>(std::string(rule) + coding, 37, 61, true, 3));
    }
  }
}

TEST_F(DeviceSparseTest, DoublesScalesSumsAndOtherNumbersOfRanks) {
  for (const int ranks : {2, 4}) {
    fake_gpu::Reset();
    LayerJob<double> job = Job<double>("rule=vgc", 20, 70, true, ranks);
    job.op = ReduceOp::kSum;
    job.prescale = 0.5;
    job.postscale = 3;
    const auto bring = job.bring;
    job.bring = [bring](int rank, int step, LayerStep<double>& mine) {
      bring(rank, step, mine);
      mine.scale = 0.3 + rank;
    };
    ExpectAsOnTheHost(job);
  }
}

TEST_F(DeviceSparseTest, LayersWithoutElementsWithoutABiasAndWithoutAGradient) {
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{1, 1}, {3, 0}, {5, 400}}) {
    for (const bool bias : {false, true}) {
      fake_gpu::Reset();
      LayerJob<float> job = Job<float>("rule=vgc_strom", out, in, bias, 2);
      const auto bring = job.bring;
      job.bring = [bring](int rank, int step, LayerStep<float>& mine) {
        if (rank == 0 || step % 2 == 0) bring(rank, step, mine);
      };
      const auto wanted = job.Run(Methods::kOnHost, false);
      ExpectSame<float>(job.Run(Methods::kOnDevice, true), wanted);
    }
  }
}

TEST_F(DeviceSparseTest, WhatIsNotFiniteGivesNaNToAllAndChangesNoState) {
  for (const char* rule : {"rule=vgc", "rule=strom"}) {
    fake_gpu::Reset();
    LayerJob<float> job = Job<float>(rule, 16, 30, true, 3);
    const auto bring = job.bring;
    job.bring = [bring](int rank, int step, LayerStep<float>& mine) {
      bring(rank, step, mine);
      if (rank == 1 && step == 2) mine.dense[77] = std::numeric_limits<float>::infinity();
      if (rank == 2 && step == 3) mine.dense_bias[0] = std::nanf("");
    };
    ExpectAsOnTheHost(job);
    const auto mine = job.Run(Methods::kOnDevice, true);
    EXPECT_TRUE(std::isnan(mine.weight[0][2][0]));
    EXPECT_EQ(mine.value[0][2] & kNotFinite, kNotFinite);
    EXPECT_TRUE(std::isnan(mine.bias[1][3][1]));
    EXPECT_FALSE(std::isnan(mine.weight[0][4][0]));
  }
}

TEST_F(DeviceSparseTest, AShareLargerThanDenseIsNotSentAndNothingIsLost) {
  // No variance to speak of: everything is worth sending, which words cannot do for less.
  LayerJob<float> job = Job<float>("rule=vgc;alpha=0;coding=word", 30, 40, true, 3);
  ExpectAsOnTheHost(job);
  const auto mine = job.Run(Methods::kOnDevice, true);
  EXPECT_EQ(mine.value[0][0] & kTooLarge, kTooLarge);
  EXPECT_EQ(mine.weight[2][0][5], 0.0f);
}

TEST_F(DeviceSparseTest, SentPlusKeptIsTheSumOfAllGradients) {
  // Powers of two and feedback: exactly.
  LayerJob<double> job = Job<double>("rule=vgc;feedback=1;coding=rice", 8, 32, false, 2);
  job.op = ReduceOp::kSum;
  job.bring = [](int rank, int step, LayerStep<double>& mine) {
    mine.dense.resize(8 * 32);
    for (size_t i = 0; i < mine.dense.size(); ++i) {
      mine.dense[i] = std::ldexp(i % 3 == 0 ? 1.0 : -1.0, static_cast<int>((i + step + rank) % 5));
    }
  };
  const auto mine = job.Run(Methods::kOnDevice, true);
  for (size_t i = 0; i < 8 * 32; ++i) {
    double wanted = 0, sent = 0, kept = 0;
    for (int step = 0; step < job.steps; ++step) {
      for (int rank = 0; rank < 2; ++rank) {
        LayerStep<double> brought;
        job.bring(rank, step, brought);
        wanted += brought.dense[i];
      }
      sent += mine.weight[0][static_cast<size_t>(step)][i];
    }
    for (const auto& state : mine.state) {
      double r = 0;
      std::memcpy(&r, state[0].bytes.data() + i * sizeof r, sizeof r);
      kept += r;
    }
    EXPECT_EQ(sent + kept, wanted);
  }
}

// A checkpoint of the device goes on on the host and the other way round, and what was not used
// goes back: as on the host.
TEST_F(DeviceSparseTest, StatesAreSavedRestoredAndReturned) {
  LayerJob<float> job = Job<float>("rule=vgc_strom;tau=1", 19, 23, true, 2);
  job.steps = 6;
  job.then = [](int, int step, const LayerStep<float>&, Ticket&, Engine& engine) {
    if (step == 1) engine.ReturnLast(0, 3);
    if (step == 3) {
      std::vector<StateTensor> saved = engine.ExportState(0, 3, "layer");
      engine.DropStates(0, 3);
      engine.ImportState(0, 3, "layer", std::move(saved));
    }
  };
  ExpectAsOnTheHost(job);
}

TEST_F(DeviceSparseTest, AContributionThatIsNotTakenThereComesByWayOfTheHostWithItsState) {
  LayerJob<float> job = Job<float>("rule=vgc;variance=sample", 12, 18, true, 2);
  job.steps = 6;
  const auto bring = job.bring;
  job.bring = [bring](int rank, int step, LayerStep<float>& mine) {
    bring(rank, step, mine);
    if (rank != 1 || (step != 2 && step != 3)) return;
    mine.rows = 4;  // beside the dense part
    mine.samples = 2;
    mine.a = Normal<float>(4 * 18, 5);
    mine.d = Normal<float>(4 * 12, 6);
  };
  ExpectAsOnTheHost(job);
}

TEST_F(DeviceSparseTest, RowsAreMultipliedOutOnTheDevice) {
  // Small integers: sums of products are exact in whatever order.
  for (const char* options : {"rule=vgc;alpha=2", "rule=strom;tau=2", "rule=vgc_strom;tau=1"}) {
    for (const bool beside_dense : {false, true}) {
      SCOPED_TRACE(options);
      fake_gpu::Reset();
      LayerJob<float> job = Job<float>(options, 15, 21, true, 3);
      const auto bring = job.bring;
      job.bring = [=](int rank, int step, LayerStep<float>& mine) {
        if (beside_dense) bring(rank, step, mine);
        const auto seed = static_cast<uint32_t>(7 * rank + step);
        mine.rows = 6;
        mine.a = Normal<float>(6 * 21, seed, 2);
        mine.d = Normal<float>(6 * 15, seed + 90, 2);
        for (std::vector<float>* values : {&mine.a, &mine.d, &mine.dense, &mine.dense_bias}) {
          for (float& x : *values) x = std::round(x);
        }
        for (float& x : mine.square) x = std::round(x);
        mine.bias_square = mine.dense_bias;
        for (float& x : mine.bias_square) x *= x;
        mine.scale = 0.5;
      };
      const auto wanted = job.Run(Methods::kOnHost, false);
      ExpectSame<float>(job.Run(Methods::kOnDevice, true), wanted);
      EXPECT_GT(fake_gpu::Count("cublasSgemm"), 0);
      EXPECT_EQ(fake_gpu::Count("cudaHostAlloc") > 0, true);
    }
  }
}

TEST_F(DeviceSparseTest, OnlyTheShareCrossesToTheHostAndNothingWaits) {
  constexpr int64_t kOut = 100, kIn = 500;
  LayerJob<float> job = Job<float>("rule=vgc", kOut, kIn, false, 2);
  const auto mine = job.Run(Methods::kOnDevice, true);
  size_t copied = 0;
  for (const auto& record : fake_gpu::Log(0)) {
    if (record.call == "cudaMemcpyAsync" && record.count > copied) copied = record.count;
  }
  // The last is that of ExportState.
  EXPECT_EQ(copied, kOut * kIn * sizeof(float));
  int large = 0;
  for (const auto& record : fake_gpu::Log(0)) {
    large += record.call == "cudaMemcpyAsync" && record.count > kOut * kIn;
    EXPECT_EQ(record.call.find("Synchronize"), std::string::npos);
  }
  EXPECT_EQ(large, 2);  // residual and variance, at the end
  EXPECT_GT(mine.stats[0].tensors[0].effective, 0.0);
}

TEST_F(DeviceSparseTest, SendsWhenTheDeviceHasComputedAndHoldsNobodyUpMeanwhile) {
  DeviceJob job(2, Wire::kStaged, {}, {}, Methods::kOnDevice);
  const LayerJob<float> layer = Job<float>("rule=strom;tau_absolute=1", 10, 10, false, 2);
  std::atomic<int> others{0};
  job.Run([&](int rank) {
    UserStream stream(rank), busy(rank);
    LayerStep<float> mine;
    mine.dense.assign(100, rank == 0 ? 0.0f : 1.5f);
    if (rank == 0) busy.Hold();  // the kernel that makes the gradient has not run
    const DeviceEvent ready = busy.Record();
    Request request = layer.RequestOf(mine, rank, ready.get());
    request.keep_alive = ready;
    auto held = job[rank].Submit(std::move(request));
    for (int i = 0; i < 3; ++i) {
      DeviceValues other({1, 2}, stream);
      auto ticket = job[rank].Submit(other.AllReduce("other"));
      ASSERT_TRUE(stream.Use(*ticket).ok());
      EXPECT_EQ(other.data[1], 4);
    }
    EXPECT_FALSE(held->Done());
    ++others;
    while (others < 2) std::this_thread::yield();
    mine.dense.assign(100, 1.5f);
    if (rank == 0) busy.Release();
    ASSERT_TRUE(stream.Use(*held).ok());
    EXPECT_EQ(mine.output[99], 1.0f);
  });
}

TEST_F(DeviceSparseTest, ARankWithoutKernelsIsNamedAndAllComputeOnTheHost) {
  const LayerJob<float> job = Job<float>("rule=vgc", 10, 10, true, 2);
  const auto mine = job.Run(Methods::kOnHost, true);  // none has them
  EXPECT_EQ(fake_gpu::Count("dad_cuda_accumulate_f32"), 0);
  ExpectSame<float>(mine, job.Run(Methods::kOnHost, false));
}

TEST_F(DeviceSparseTest, ALostPeerLeavesNothingBehind) {
  DeviceJob job(3, Wire::kStaged, {}, {}, Methods::kOnDevice);
  const LayerJob<float> layer = Job<float>("rule=vgc", 40, 40, true, 3);
  std::atomic<int> ready_ranks{0};
  job.Run([&](int rank) {
    UserStream stream(rank);
    for (int step = 0; step < 4; ++step) {
      LayerStep<float> mine;
      layer.bring(rank, step, mine);
      const DeviceEvent ready = stream.Record();
      Request request = layer.RequestOf(mine, rank, ready.get());
      request.keep_alive = ready;
      if (step == 3) {
        ++ready_ranks;
        while (ready_ranks < 3) std::this_thread::yield();
        if (rank == 2) {
          job.network().Kill(2);
          return;
        }
      }
      const Status status = job[rank].Submit(std::move(request))->Wait(nccl::kLong);
      EXPECT_EQ(status.ok(), step < 3) << status.ToString();
    }
  });
}

// Exchanges by hand: what a recall does to a step that has begun.
TEST_F(DeviceSparseTest, AStepThatIsCancelledIsAsIfItHadNotBegun) {
  setenv("DAD_CUDART_LIBRARY", DAD_FAKE_GPU, 1);
  const LayerJob<float> layer = Job<float>("rule=vgc_strom;tau=1", 14, 17, true, 2);
  std::vector<std::vector<float>> results[2];
  for (const bool cancels : {false, true}) {
    StateStore states[2];
    std::unique_ptr<Exchange> exchange[2];
    for (int rank = 0; rank < 2; ++rank) {
      auto bench = DeviceBench::Find(rank, {DAD_FAKE_KERNELS, DAD_FAKE_GPU});
      ASSERT_TRUE(bench.ok()) << bench.status().ToString();
      ExchangeEnv env;
      env.states = &states[rank];
      env.bench = bench.value();
      TensorSpec spec;
      spec.name = "layer";
      spec.method = layer.method;
      spec.shape = {14 * 18};
      spec.device = DeviceType::kCuda;
      ASSERT_TRUE(ComputesOnDevice(spec, env));
      exchange[rank] = std::move(MakeExchange(spec, {}, 0, env)).value();
    }
    for (int step = 0; step < 3; ++step) {
      LayerStep<float> mine[2];
      Request request[2];
      std::vector<std::byte> share[2];
      for (int rank = 0; rank < 2; ++rank) {
        layer.bring(rank, step, mine[rank]);
        request[rank] = layer.RequestOf(mine[rank], rank, nullptr);
        StepInput input;
        input.mine = &request[rank].tensors[0];
        const Group group{rank, 2, {}};
        ASSERT_TRUE(exchange[rank]->Begin(input, group).ok());
        if (cancels && (step + rank) % 2 == 0) {
          if (step == 1) {
            ASSERT_TRUE(exchange[rank]->Ready(0).ok());
          }
          exchange[rank]->Cancel();
          ASSERT_TRUE(exchange[rank]->Begin(input, group).ok());
        }
        for (;;) {
          const Result<DeviceEvent> event = exchange[rank]->Ready(0);
          ASSERT_TRUE(event.ok()) << event.status().ToString();
          if (event.value() == nullptr) break;
        }
        GatherBuffer out;
        ASSERT_TRUE(exchange[rank]->Send(0, 1 - rank, out).ok());
        for (const ByteSpan piece : out.Pieces()) {
          share[rank].insert(share[rank].end(), piece.begin(), piece.end());
        }
      }
      for (int rank = 0; rank < 2; ++rank) {
        std::vector<ByteSpan> shares(2);
        shares[static_cast<size_t>(1 - rank)] = share[1 - rank];
        ASSERT_TRUE(exchange[rank]->Receive(0, shares).ok());
        ASSERT_TRUE(exchange[rank]->Finish().ok());
      }
      results[cancels].push_back(mine[0].output);
    }
  }
  EXPECT_EQ(results[0], results[1]);
  unsetenv("DAD_CUDART_LIBRARY");
}

TEST_F(DeviceSparseTest, AMalformedShareIsFoundBeforeTheDeviceSeesIt) {
  setenv("DAD_CUDART_LIBRARY", DAD_FAKE_GPU, 1);
  const LayerJob<float> layer = Job<float>("rule=strom;coding=word;tau_absolute=1", 4, 8, false, 2);
  StateStore states;
  ExchangeEnv env;
  env.states = &states;
  env.bench = DeviceBench::Find(0, {DAD_FAKE_KERNELS, DAD_FAKE_GPU}).value();
  TensorSpec spec;
  spec.name = "layer";
  spec.method = layer.method;
  spec.shape = {32};
  spec.device = DeviceType::kCuda;
  // flags, tau, a count, and a word with index 32 of 32
  const unsigned char bad[] = {0, 0, 0, 0x80, 0x3f, 1, 32, 0, 0, 0};
  for (const size_t length : {size_t{0}, size_t{3}, sizeof bad}) {
    auto exchange = std::move(MakeExchange(spec, {}, 0, env)).value();
    LayerStep<float> mine;
    layer.bring(0, 0, mine);
    const Request request = layer.RequestOf(mine, 0, nullptr);
    StepInput input;
    input.mine = &request.tensors[0];
    ASSERT_TRUE(exchange->Begin(input, {0, 2, {}}).ok());
    while (exchange->Ready(0).value() != nullptr) {
    }
    const ByteSpan shares[] = {{}, std::as_bytes(std::span(bad, length))};
    const Status status = exchange->Receive(0, shares);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("rank 1 sent a malformed share"), std::string::npos);
  }
  unsetenv("DAD_CUDART_LIBRARY");
}

TEST_F(DeviceSparseTest, AJoinedRankHasNoPart) {
  DeviceJob job(3, Wire::kStaged, {}, {}, Methods::kOnDevice);
  const LayerJob<float> layer = Job<float>("rule=strom;tau_absolute=1", 10, 10, false, 3);
  job.Run([&](int rank) {
    UserStream stream(rank);
    if (rank != 1) {
      LayerStep<float> mine;
      mine.dense.assign(100, 1.25f);
      const DeviceEvent ready = stream.Record();
      Request request = layer.RequestOf(mine, rank, ready.get());
      request.keep_alive = ready;
      auto ticket = job[rank].Submit(std::move(request));
      const Status used = stream.Use(*ticket);
      ASSERT_TRUE(used.ok()) << used.ToString();
      EXPECT_FLOAT_EQ(mine.output[7], 2.0f / 3.0f);
    }
    Request join;
    join.kind = OpKind::kJoin;
    join.name = "join";
    EXPECT_TRUE(job[rank].Submit(std::move(join))->Wait(nccl::kLong).ok());
  });
}

}  // namespace
}  // namespace dad
