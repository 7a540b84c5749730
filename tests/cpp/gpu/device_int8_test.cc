// int8 and qsgd of device tensors, against the host's exchange bit for bit: on the recording fake,
// with the kernels emulated. No GPU has run any of it.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "method_job.h"

namespace dad {
namespace {

class DeviceTensorTest : public MethodTest {
 protected:
  struct Job {
    std::string method = "int8;bucket=64";
    int ranks = 3;
    int64_t count = 5000;
    int steps = 5;
    ReduceOp op = ReduceOp::kAverage;
    double postscale = 1.0;
    std::function<void(int rank, int step, std::vector<float>&)> change;
    std::function<void(int rank, int step, Engine&)> then;
  };
  struct Outcome {
    std::vector<std::vector<std::vector<float>>> result;  // [rank][step]
    std::vector<std::vector<StateTensor>> state;
    std::vector<int64_t> sent;
  };

  // `elsewhere`: on which ranks the tensor is on a device that the engine does not compute on.
  static Outcome Run(const Job& job, bool on_device, std::vector<bool> elsewhere = {}) {
    Outcome outcome;
    outcome.result.resize(static_cast<size_t>(job.ranks));
    outcome.state.resize(outcome.result.size());
    outcome.sent.resize(outcome.result.size());
    DeviceJob engines(job.ranks, Wire::kStaged, {}, {}, Methods::kOnDevice);
    engines.Run([&](int rank) {
      const auto r = static_cast<size_t>(rank);
      const bool other = r < elsewhere.size() && elsewhere[r];
      UserStream stream(other ? 7 : rank);
      for (int step = 0; step < job.steps; ++step) {
        std::vector<float> input =
            Normal<float>(job.count, static_cast<uint32_t>(10 * rank + step), 0.1 + rank);
        if (job.change) job.change(rank, step, input);
        DeviceValues values(std::move(input), stream);
        Request request = values.AllReduce("q", job.op);
        request.method = job.method;
        request.prescale = 0.75;
        request.postscale = job.postscale;
        request.tensors[0].scale = 1.5;
        if (!on_device) {
          for (TensorView* view : {&request.tensors[0].input, &request.tensors[0].output}) {
            view->device = DeviceType::kCpu;
            view->device_index = -1;
            view->ready_event = nullptr;
          }
        }
        auto ticket = engines[rank].Submit(std::move(request));
        const Status used = stream.Use(*ticket);
        ASSERT_TRUE(used.ok()) << used.ToString();
        outcome.result[r].push_back(values.data);
        if (job.then) job.then(rank, step, engines[rank]);
      }
      outcome.state[r] = engines[rank].ExportState(0, 0, "q");
      outcome.sent[r] = engines[rank].GetStats().tensors.at(0).wire_bytes_sent;
    });
    return outcome;
  }

  static void ExpectSame(const Outcome& mine, const Outcome& wanted) {
    EXPECT_EQ(mine.sent, wanted.sent);
    for (size_t r = 0; r < wanted.result.size(); ++r) {
      ASSERT_EQ(mine.result[r].size(), wanted.result[r].size());
      for (size_t s = 0; s < wanted.result[r].size(); ++s) {
        ExpectSameBits(mine.result[r][s], wanted.result[r][s],
                       "rank " + std::to_string(r) + ", step " + std::to_string(s));
      }
      ASSERT_EQ(mine.state[r].size(), wanted.state[r].size());
      for (size_t t = 0; t < wanted.state[r].size(); ++t) {
        EXPECT_EQ(mine.state[r][t].name, wanted.state[r][t].name);
        EXPECT_TRUE(mine.state[r][t].bytes == wanted.state[r][t].bytes) << wanted.state[r][t].name;
      }
    }
  }
};

class DeviceInt8Test : public DeviceTensorTest {};
class DeviceQsgdTest : public DeviceTensorTest {};

TEST_F(DeviceInt8Test, GivesTheBitsOfTheHost) {
  for (const char* method : {"int8", "int8;bucket=64", "int8;bucket=7;feedback=0"}) {
    for (const int64_t count : {1, 600, 5000}) {
      SCOPED_TRACE(method + std::string(", ") + std::to_string(count));
      Job job;
      job.method = method;
      job.count = count;
      job.ranks = count == 600 ? 4 : 3;
      job.op = count == 600 ? ReduceOp::kSum : ReduceOp::kAverage;
      job.postscale = count == 600 ? 0.3 : 1.0;
      const Outcome wanted = Run(job, false);
      EXPECT_EQ(fake_gpu::Count("dad_cuda_quantise_int8_f32"), 0);
      ExpectSame(Run(job, true), wanted);
      EXPECT_GT(fake_gpu::Count("dad_cuda_quantise_int8_f32"), 0);
      fake_gpu::Reset();
    }
  }
}

TEST_F(DeviceInt8Test, WhatIsNotFiniteGivesNaNToAllAndChangesNoState) {
  Job job;
  job.change = [](int rank, int step, std::vector<float>& input) {
    if (rank == 2 && step == 1) input[4000] = std::numeric_limits<float>::infinity();
  };
  const Outcome mine = Run(job, true);
  ExpectSame(mine, Run(job, false));
  EXPECT_TRUE(std::isnan(mine.result[0][1][0]));
  EXPECT_FALSE(std::isnan(mine.result[0][2][0]));
}

TEST_F(DeviceInt8Test, StatesAreSavedRestoredAndReturned) {
  Job job;
  job.then = [](int, int step, Engine& engine) {
    if (step == 1) engine.ReturnLast(0, 0);
    if (step != 2) return;
    std::vector<StateTensor> saved = engine.ExportState(0, 0, "q");
    engine.DropStates(0, 0);
    engine.ImportState(0, 0, "q", std::move(saved));
  };
  ExpectSame(Run(job, true), Run(job, false));
}

TEST_F(DeviceInt8Test, ARankWhoseTensorIsOnAnotherDeviceComputesOnTheHost) {
  Job job;
  ExpectSame(Run(job, true, {false, true, false}), Run(job, false));
}

TEST_F(DeviceInt8Test, AJoinedRankServesAsOwner) {
  DeviceJob job(3, Wire::kStaged, {}, {}, Methods::kOnDevice);
  job.Run([&](int rank) {
    UserStream stream(rank);
    if (rank != 1) {
      DeviceValues values(std::vector<float>(3000, 3.0f), stream);
      Request request = values.AllReduce("q", ReduceOp::kAverage);
      request.method = "int8";
      auto ticket = job[rank].Submit(std::move(request));
      const Status used = stream.Use(*ticket);
      ASSERT_TRUE(used.ok()) << used.ToString();
      for (const size_t i : {size_t{0}, size_t{1500}, size_t{2999}}) {
        EXPECT_NEAR(values.data[i], 2.0f, 0.02f);
      }
    }
    Request join;
    join.kind = OpKind::kJoin;
    join.name = "join";
    EXPECT_TRUE(job[rank].Submit(std::move(join))->Wait(nccl::kLong).ok());
  });
}

TEST_F(DeviceQsgdTest, GivesTheBitsOfTheHost) {
  for (const char* method : {"qsgd", "qsgd;bits=1;seed=9", "qsgd;bits=3", "qsgd;bits=8"}) {
    for (const int64_t count : {1, 600, 5000}) {
      SCOPED_TRACE(method + std::string(", ") + std::to_string(count));
      Job job;
      job.method = method;
      job.count = count;
      job.ranks = count == 600 ? 4 : 3;
      job.op = count == 600 ? ReduceOp::kSum : ReduceOp::kAverage;
      job.postscale = count == 600 ? 0.3 : 1.0;
      const Outcome wanted = Run(job, false);
      EXPECT_EQ(fake_gpu::Count("dad_cuda_encode_qsgd_f32"), 0);
      ExpectSame(Run(job, true), wanted);
      EXPECT_EQ(fake_gpu::Count("dad_cuda_encode_qsgd_f32"), job.ranks * job.steps);
      fake_gpu::Reset();
    }
  }
}

TEST_F(DeviceQsgdTest, WhatIsNotFiniteGivesNaNToAllAndIsNoStep) {
  Job job;
  job.method = "qsgd";
  job.change = [](int rank, int step, std::vector<float>& input) {
    if (rank == 2 && step == 1) input[4000] = std::numeric_limits<float>::quiet_NaN();
  };
  const Outcome mine = Run(job, true);
  ExpectSame(mine, Run(job, false));
  EXPECT_TRUE(std::isnan(mine.result[0][1][0]));
  EXPECT_FALSE(std::isnan(mine.result[0][2][0]));
}

TEST_F(DeviceQsgdTest, TheStepIsSavedAndARankMayComputeOnTheHost) {
  Job job;
  job.method = "qsgd;bits=2";
  job.then = [](int, int step, Engine& engine) {
    if (step != 2) return;
    std::vector<StateTensor> saved = engine.ExportState(0, 0, "q");
    engine.DropStates(0, 0);
    engine.ImportState(0, 0, "q", std::move(saved));
  };
  const Outcome wanted = Run(job, false);
  ExpectSame(Run(job, true), wanted);
  ExpectSame(Run(job, true, {false, true, false}), wanted);
}

}  // namespace
}  // namespace dad
