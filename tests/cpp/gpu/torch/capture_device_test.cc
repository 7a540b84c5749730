// Capture of eager layers on CUDA: what a layer's gradient is made of is kept on the stream that
// backward runs on, and taken on another. With a torch for the CPU and a device that plays on the
// recording fake: no GPU has run any of it.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>

#include "fake_torch_device.h"
#include "torch_ops/capture/capture.h"

namespace dad_torch {
namespace {

using dad::UserStream;
using dad::fake_gpu::Record;

class CaptureDeviceTest : public testing::Test {
 protected:
  const bool fresh_ = (dad::fake_gpu::Reset(), true);
  const dad::DeviceJob job_{1, dad::Wire::kStaged};  // brings the fake
};

at::Tensor Parameter(const at::Tensor& host) {
  at::Tensor parameter = MadeOnDevice(host, 0);
  parameter.set_requires_grad(true);
  TrackParameter(parameter, CaptureMode::kRows);
  return parameter;
}

// Forward and backward on a stream, as a training script has it.
void Train(const UserStream& stream, const std::function<at::Tensor()>& forward,
           const at::Tensor& grad) {
  const c10::StreamGuard guard(TorchStream(stream));
  torch::autograd::backward({forward()}, {MadeOnDevice(grad, 0)});
}

std::vector<Record> WaitsOn(const UserStream& stream) {
  std::vector<Record> waits = dad::Calls(0, "cudaStreamWaitEvent");
  std::erase_if(waits, [&](const Record& each) { return each.stream != stream.get(); });
  return waits;
}

TEST_F(CaptureDeviceTest, RowsOfALinearLayerAreKeptInsteadOfItsGradient) {
  const UserStream stream(0);
  const at::Tensor x = at::randn({5, 3}), grad = at::randn({5, 2});
  const at::Tensor weight = Parameter(at::randn({2, 3}));
  Train(
      stream, [&] { return at::linear(MadeOnDevice(x, 0), weight); }, grad);
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_EQ(CaptureReason(weight), "");
  const c10::StreamGuard guard(TorchStream(stream));
  const std::vector<Segment> segments = TakeSegments(weight);
  ASSERT_EQ(segments.size(), 1u);
  EXPECT_TRUE(segments[0].a.is_cuda());
  EXPECT_TRUE(OnHost(segments[0].a).equal(x));
  EXPECT_TRUE(OnHost(segments[0].d).equal(grad));
  EXPECT_TRUE(WaitsOn(stream).empty());  // it is the stream that made them
}

TEST_F(CaptureDeviceTest, AnotherStreamThatTakesTheRowsWaitsForThemAndTheirMemoryIsKeptForIt) {
  const UserStream maker(0), taker(0);
  const at::Tensor weight = Parameter(at::randn({2, 3}));
  Train(
      maker,
      [&] {
        return at::linear(MadeOnDevice(at::randn({5, 3}), 0), weight);
      },
      at::randn({5, 2}));
  const c10::StreamGuard guard(TorchStream(taker));
  const std::vector<Segment> segments = TakeSegments(weight);
  ASSERT_EQ(segments.size(), 1u);
  // An event that was recorded on the stream of backward, after the rows were there.
  const std::vector<Record> waits = WaitsOn(taker);
  ASSERT_EQ(waits.size(), 1u);
  const std::vector<Record> records = dad::Calls(0, "cudaEventRecord");
  EXPECT_TRUE(std::any_of(records.begin(), records.end(), [&](const Record& each) {
    return each.stream == maker.get() && each.event == waits[0].event;
  }));
  const KeptFor kept = RecordedOnStreams();
  for (const at::Tensor& tensor : {segments[0].a, segments[0].d}) {
    const std::pair<const void*, int64_t> wanted{tensor.storage().data_ptr().get(),
                                                 reinterpret_cast<int64_t>(taker.get())};
    EXPECT_NE(std::find(kept.begin(), kept.end(), wanted), kept.end());
  }
}

TEST_F(CaptureDeviceTest, SeveralUsesAreKeptWithTheirBias) {
  const UserStream stream(0);
  const at::Tensor weight = Parameter(at::randn({2, 3}));
  const at::Tensor bias = Parameter(at::randn({2}));
  const at::Tensor x = MadeOnDevice(at::randn({4, 3}), 0);
  Train(
      stream, [&] { return at::linear(x, weight, bias).add(at::linear(x, weight, bias)); },
      at::randn({4, 2}));
  EXPECT_FALSE(bias.grad().defined());
  const c10::StreamGuard guard(TorchStream(stream));
  const std::vector<Segment> segments = TakeSegments(weight);
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_TRUE(segments[0].has_bias && segments[1].has_bias);
}

// Which rows to leave out would have to be read from the device.
TEST_F(CaptureDeviceTest, PaddingRowsOfAnEmbeddingAreZeroAndTheHostDoesNotLook) {
  const UserStream stream(0);
  const at::Tensor weight = Parameter(at::randn({4, 3}));
  const at::Tensor index = at::tensor({1, 3, 1, 0}, at::kLong), grad = at::randn({4, 3});
  Train(
      stream, [&] { return at::embedding(weight, MadeOnDevice(index, 0), /*padding_idx=*/1); },
      grad);
  const c10::StreamGuard guard(TorchStream(stream));
  const std::vector<Segment> segments = TakeSegments(weight);
  ASSERT_EQ(segments.size(), 1u);
  EXPECT_TRUE(OnHost(segments[0].index).equal(index));
  at::Tensor wanted = grad.clone();
  wanted[0].zero_();
  wanted[2].zero_();
  EXPECT_TRUE(OnHost(segments[0].x).equal(wanted));
}

}  // namespace
}  // namespace dad_torch
