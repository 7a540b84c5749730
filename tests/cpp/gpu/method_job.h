// The same layer by the same method, with its tensors on a device or on the host: what comes out
// must be equal. Devices are the fake's.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device_job.h"

namespace dad {

// What one rank brings to a step and gets back. Memory of the "device" is that of the host.
template <typename T>
struct LayerStep {
  std::vector<T> dense, dense_bias, square, bias_square;
  std::vector<T> a, d;  // rows
  int64_t rows = 0;
  int64_t samples = 0;
  std::vector<T> output, output_bias;
  double scale = 1.0;
  bool replan = false;
};

template <typename T>
inline std::vector<T> Normal(int64_t count, uint32_t seed, double scale = 1.0) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& x : values) x = static_cast<T>(scale * normal(random));
  return values;
}

template <typename T>
struct LayerJob {
  std::string method;  // with its layer
  int64_t out = 1, in = 1;
  bool bias = false;
  int ranks = 2;
  int steps = 5;
  ReduceOp op = ReduceOp::kAverage;
  double prescale = 1.0, postscale = 1.0;
  // Fills what a rank brings; outputs are made here.
  std::function<void(int rank, int step, LayerStep<T>&)> bring;
  // Called when the result is there.
  std::function<void(int rank, int step, const LayerStep<T>&, Ticket&, Engine&)> then;

  struct Outcome {
    // [rank][step]
    std::vector<std::vector<std::vector<T>>> weight, bias;
    std::vector<std::vector<int64_t>> value;  // of the tickets
    std::vector<std::vector<StateTensor>> state;
    std::vector<Stats> stats;
  };

  Request RequestOf(LayerStep<T>& step, int device, void* ready) const {
    Request request;
    request.name = "layer";
    request.op = op;
    request.prescale = prescale;
    request.postscale = postscale;
    request.stream = 3;
    request.method = method;
    auto view = [&](std::vector<T>& values, Shape shape) {
      TensorView view;
      view.data = values.empty() ? nullptr : values.data();
      view.dtype = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
      view.shape = std::move(shape);
      if (device >= 0) {
        view.device = DeviceType::kCuda;
        view.device_index = device;
        view.ready_event = ready;
      }
      return view;
    };
    const int64_t weight = out * in;
    step.output.assign(static_cast<size_t>(weight), T(-7));
    step.output_bias.assign(static_cast<size_t>(bias ? out : 0), T(-7));
    Contribution& tensor = request.tensors.emplace_back();
    tensor.scale = step.scale;
    tensor.replan = step.replan;
    LayerInput& layer = tensor.layers.emplace_back();
    if (!step.dense.empty()) layer.dense = view(step.dense, {out, in});
    if (!step.dense_bias.empty()) layer.dense_bias = view(step.dense_bias, {out});
    if (!step.square.empty()) layer.dense_square = view(step.square, {out, in});
    if (!step.bias_square.empty()) layer.dense_bias_square = view(step.bias_square, {out});
    if (!step.a.empty()) {
      layer.rows.emplace_back();
      layer.rows[0].a = view(step.a, {step.rows, in});
      layer.rows[0].d = view(step.d, {step.rows, out});
      layer.rows[0].samples = step.samples;
    }
    layer.output = view(step.output, {out, in});
    if (bias) layer.output_bias = view(step.output_bias, {out});
    std::vector<T> none;
    tensor.input = view(none, {weight + (bias ? out : 0)});
    tensor.output = tensor.input;
    return request;
  }

  Outcome Run(Methods methods, bool on_device) const {
    Outcome outcome;
    outcome.weight.resize(static_cast<size_t>(ranks));
    outcome.bias = outcome.weight;
    outcome.value.resize(static_cast<size_t>(ranks));
    outcome.state.resize(static_cast<size_t>(ranks));
    outcome.stats.resize(static_cast<size_t>(ranks));
    DeviceJob job(ranks, Wire::kStaged, {}, {}, methods);
    job.Run([&](int rank) {
      const auto r = static_cast<size_t>(rank);
      UserStream stream(rank);
      for (int step = 0; step < steps; ++step) {
        LayerStep<T> mine;
        bring(rank, step, mine);
        const DeviceEvent ready = on_device ? stream.Record() : nullptr;
        Request request = RequestOf(mine, on_device ? rank : -1, ready.get());
        request.keep_alive = ready;
        auto ticket = job[rank].Submit(std::move(request));
        const Status used = stream.Use(*ticket);
        ASSERT_TRUE(used.ok()) << used.ToString();
        outcome.weight[r].push_back(mine.output);
        outcome.bias[r].push_back(mine.output_bias);
        outcome.value[r].push_back(ticket->value());
        if (then) then(rank, step, mine, *ticket, job[rank]);
      }
      outcome.state[r] = job[rank].ExportState(0, 3, "layer");
      outcome.stats[r] = job[rank].GetStats();
    });
    return outcome;
  }
};

template <typename T>
void ExpectSameBits(const std::vector<T>& mine, const std::vector<T>& wanted,
                    const std::string& what) {
  ASSERT_EQ(mine.size(), wanted.size()) << what;
  if (mine.empty() || std::memcmp(mine.data(), wanted.data(), mine.size() * sizeof(T)) == 0) return;
  for (size_t i = 0; i < mine.size(); ++i) {
    ASSERT_EQ(std::memcmp(&mine[i], &wanted[i], sizeof(T)), 0)
        << what << ", element " << i << ": " << mine[i] << ", expected " << wanted[i];
  }
}

// Results, tickets, bytes on the wire and states.
template <typename T>
void ExpectSame(const typename LayerJob<T>::Outcome& mine,
                const typename LayerJob<T>::Outcome& wanted) {
  ASSERT_EQ(mine.weight.size(), wanted.weight.size());
  EXPECT_EQ(mine.value, wanted.value);
  for (size_t r = 0; r < mine.weight.size(); ++r) {
    ASSERT_EQ(mine.weight[r].size(), wanted.weight[r].size());
    for (size_t s = 0; s < mine.weight[r].size(); ++s) {
      const std::string where = "rank " + std::to_string(r) + ", step " + std::to_string(s);
      ExpectSameBits(mine.weight[r][s], wanted.weight[r][s], "weight, " + where);
      ExpectSameBits(mine.bias[r][s], wanted.bias[r][s], "bias, " + where);
    }
    ASSERT_EQ(mine.state[r].size(), wanted.state[r].size());
    for (size_t t = 0; t < mine.state[r].size(); ++t) {
      EXPECT_EQ(mine.state[r][t].name, wanted.state[r][t].name);
      EXPECT_EQ(mine.state[r][t].shape, wanted.state[r][t].shape);
      EXPECT_TRUE(mine.state[r][t].bytes == wanted.state[r][t].bytes)
          << mine.state[r][t].name << " of rank " << r;
    }
    ASSERT_EQ(mine.stats[r].tensors.size(), 1u);
    EXPECT_EQ(mine.stats[r].tensors[0].wire_bytes_sent, wanted.stats[r].tensors[0].wire_bytes_sent);
    EXPECT_EQ(mine.stats[r].tensors[0].effective, wanted.stats[r].tensors[0].effective);
  }
}

// Nothing may be left of a job when it is over.
class MethodTest : public testing::Test {
 protected:
  void SetUp() override { fake_gpu::Reset(); }
  void TearDown() override {
    ReleasePassed();
    EXPECT_EQ(fake_gpu::LiveStreams(), 0);
    EXPECT_EQ(fake_gpu::LiveEvents(), 0);
    EXPECT_EQ(fake_gpu::LiveBlocks(), 0);
    EXPECT_EQ(fake_gpu::LiveHandles(), 0);
    fake_gpu::Reset();
  }
};

}  // namespace dad
