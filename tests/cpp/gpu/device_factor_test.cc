// dAD of a layer on devices, against the host's exchange to rounding, and between ranks bit for
// bit: on the recording fake, with its cuBLAS and the kernels emulated. No GPU has run any of it.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "method_job.h"

namespace dad {
namespace {

class DeviceFactorTest : public MethodTest {};

LayerJob<float> Job(const std::string& options, int64_t out, int64_t in, bool bias, int ranks) {
  LayerJob<float> job;
  job.method = "factor" + options + ";layer=" + std::to_string(out) + "x" + std::to_string(in) +
               (bias ? ":bias" : "");
  job.out = out;
  job.in = in;
  job.bias = bias;
  job.ranks = ranks;
  job.steps = 3;
  job.bring = [=](int rank, int step, LayerStep<float>& mine) {
    const auto seed = static_cast<uint32_t>(100 * rank + step);
    mine.rows = rank == 1 && step == 1 ? 0 : 4 + rank;  // uneven, and none
    mine.a = Normal<float>(mine.rows * in, seed);
    for (float& x : mine.a) x = std::max(x, 0.0f);  // zeros are packed
    mine.d = Normal<float>(mine.rows * out, seed + 50);
  };
  return job;
}

void ExpectNear(const LayerJob<float>::Outcome& mine, const LayerJob<float>::Outcome& wanted) {
  for (size_t r = 0; r < wanted.weight.size(); ++r) {
    ASSERT_EQ(mine.weight[r].size(), wanted.weight[r].size());
    for (size_t s = 0; s < wanted.weight[r].size(); ++s) {
      const std::string where = "rank " + std::to_string(r) + ", step " + std::to_string(s);
      ExpectSameBits(mine.weight[r][s], mine.weight[0][s], "replicas, " + where);
      ExpectSameBits(mine.bias[r][s], mine.bias[0][s], "replicas, " + where);
      for (size_t i = 0; i < wanted.weight[r][s].size(); ++i) {
        ASSERT_NEAR(mine.weight[r][s][i], wanted.weight[r][s][i], 2e-5) << where;
      }
      for (size_t i = 0; i < wanted.bias[r][s].size(); ++i) {
        ASSERT_NEAR(mine.bias[r][s][i], wanted.bias[r][s][i], 2e-5) << where;
      }
    }
    EXPECT_EQ(mine.value[r], wanted.value[r]);
    EXPECT_EQ(mine.stats[r].tensors[0].wire_bytes_sent, wanted.stats[r].tensors[0].wire_bytes_sent);
  }
}

TEST_F(DeviceFactorTest, IsThePooledProductOfTheHostToRounding) {
  for (const char* options : {"", ";wire=bf16"}) {
    for (const int ranks : {2, 3}) {
      for (const bool bias : {false, true}) {
        SCOPED_TRACE(options + std::string(", ranks ") + std::to_string(ranks));
        fake_gpu::Reset();
        LayerJob<float> job = Job(options, 9, 14, bias, ranks);
        job.prescale = 0.5;
        const auto wanted = job.Run(Methods::kOnHost, false);
        EXPECT_EQ(fake_gpu::Count("cublasSgemm"), 0);
        ExpectNear(job.Run(Methods::kOnDevice, true), wanted);
        // One for the weight and one for the bias, in every step on every rank.
        EXPECT_EQ(fake_gpu::Count("cublasSgemm"), ranks * job.steps * (bias ? 2 : 1));
      }
    }
  }
}

TEST_F(DeviceFactorTest, WeightsOfRanksAndDenseRemaindersAreAdded) {
  LayerJob<float> job = Job("", 6, 8, true, 3);
  const auto bring = job.bring;
  job.bring = [bring](int rank, int step, LayerStep<float>& mine) {
    bring(rank, step, mine);
    mine.scale = 0.25 * (rank + 1);
    mine.replan = rank == 2 && step == 1;
    if (rank != 1) return;
    mine.dense = Normal<float>(6 * 8, 9);
    mine.dense_bias = Normal<float>(6, 10);
    if (step == 2) mine.a.clear();  // nothing but what came formed
  };
  ExpectNear(job.Run(Methods::kOnDevice, true), job.Run(Methods::kOnHost, false));
}

TEST_F(DeviceFactorTest, IndexedRowsMayRepeatAndAreAddedInOrder) {
  constexpr int64_t kOut = 7, kIn = 300;
  std::vector<std::vector<float>> results(2);
  std::vector<float> wanted(kOut * kIn);
  DeviceJob job(2, Wire::kStaged, {}, {}, Methods::kOnDevice);
  job.Run([&](int rank) {
    UserStream stream(rank);
    LayerJob<float> layer = Job("", kOut, kIn, false, 2);
    LayerStep<float> mine;
    std::vector<int64_t> index{3, 0, 3, 6, rank};
    std::vector<float> x = Normal<float>(5 * kIn, static_cast<uint32_t>(rank));
    const DeviceEvent ready = stream.Record();
    Request request = layer.RequestOf(mine, rank, ready.get());
    request.keep_alive = ready;
    IndexedSegment& segment = request.tensors[0].layers[0].indexed.emplace_back();
    segment.index = segment.x = request.tensors[0].layers[0].output;
    segment.index.data = index.data();
    segment.index.dtype = DType::kInt64;
    segment.index.shape = {5};
    segment.x.data = x.data();
    segment.x.shape = {5, kIn};
    auto ticket = job[rank].Submit(std::move(request));
    const Status used = stream.Use(*ticket);
    ASSERT_TRUE(used.ok()) << used.ToString();
    results[static_cast<size_t>(rank)] = mine.output;
  });
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<float> x = Normal<float>(5 * kIn, static_cast<uint32_t>(rank));
    const int64_t index[] = {3, 0, 3, 6, rank};
    for (int64_t k = 0; k < 5; ++k) {
      for (int64_t j = 0; j < kIn; ++j) {
        wanted[static_cast<size_t>(index[k] * kIn + j)] +=
            0.5f * x[static_cast<size_t>(k * kIn + j)];
      }
    }
  }
  ExpectSameBits(results[0], results[1], "replicas");
  ExpectSameBits(results[0], wanted, "sum");
}

TEST_F(DeviceFactorTest, OtherGpusOnOneRankMeanTheHost) {
  fake_gpu::SetMultiprocessors(1, 108);  // its products would have other bits
  LayerJob<float> job = Job("", 5, 5, true, 2);
  const auto mine = job.Run(Methods::kOnDevice, true);
  EXPECT_EQ(fake_gpu::Count("cublasSgemm"), 0);
  ExpectSame<float>(mine, job.Run(Methods::kOnHost, false));
}

}  // namespace
}  // namespace dad
