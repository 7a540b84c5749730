// torch's side of device tensors, with a torch for the CPU that is given a device that plays on the
// recording fake. Shows that the ops record, wait and allocate on the streams that torch calls
// current; not that a CUDA build of torch does the same.
#include "torch_ops/device/device_stream.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include "fake_torch_device.h"
#include "torch_ops/ops/tensor_adapter.h"

namespace dad_torch {
namespace {

TEST(DeviceStreamTest, ATensorTellsItsDevice) {
  std::vector<float> values{1, 2, 3, 4, 5, 6};
  const at::Tensor tensor = OnDevice(values.data(), {2, 3}, 3);
  const auto dense = Dense(tensor);
  ASSERT_TRUE(dense.ok()) << dense.status().ToString();
  const dad::TensorView view = ViewOf(dense.value());
  EXPECT_EQ(view.device, dad::DeviceType::kCuda);
  EXPECT_EQ(view.device_index, 3);
  EXPECT_EQ(view.shape, (dad::Shape{2, 3}));
  EXPECT_EQ(view.data, values.data());
}

TEST(DeviceStreamTest, ADeviceThatIsNotKnownIsRefused) {
  EXPECT_TRUE(CheckDevice(c10::kCPU).ok());
  EXPECT_FALSE(CheckDevice(c10::Device(c10::kXPU, 0)).ok());
}

TEST(DeviceStreamTest, MemoryBelongsToTheStreamThatAskedForIt) {
  const dad::DeviceJob job(1, dad::Wire::kStaged);
  const dad::UserStream stream(2);
  const at::Tensor tensor = AllocateOn(TorchStream(stream), dad::DType::kFloat32, {3});
  EXPECT_EQ(AllocatedOn(), reinterpret_cast<int64_t>(stream.get()));
  EXPECT_EQ(CurrentStreamId(2), 0);  // and the thread's own stream is what it was
  EXPECT_EQ(tensor.device().index(), 2);
}

// From the stream that makes a gradient to the one that uses the sum.
TEST(DeviceStreamTest, ASumWaitsForTheCurrentStreamAndTheCurrentStreamForTheSum) {
  dad::fake_gpu::Reset();
  for (const dad::Wire wire : {dad::Wire::kNccl, dad::Wire::kStaged}) {
    dad::DeviceJob job(2, wire);
    job.Run([&](int rank) {
      const dad::UserStream maker(rank);
      const dad::UserStream user(rank);
      const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(rank));
      std::vector<float> values(4, 0);
      dad::Request request;
      request.name = "sum";
      {
        const c10::StreamGuard guard(TorchStream(maker));
        maker.Hold();
        const at::Tensor tensor = OnDevice(values.data(), {4}, rank);
        request.tensors.emplace_back();
        request.tensors[0].input = request.tensors[0].output = ViewOf(tensor);
        request.keep_alive = std::make_shared<at::Tensor>(tensor);
        SetReady(request);
      }
      auto ticket = job[rank].Submit(std::move(request));
      std::fill(values.begin(), values.end(), 1.0f + rank);
      maker.Release();
      ASSERT_TRUE(ticket->Wait(dad::nccl::kLong).ok());
      const c10::StreamGuard guard(TorchStream(user));
      WaitOnCurrentStream(device, ticket->done_event());
      ASSERT_TRUE(dad::WaitForEvent(rank, user.Record(), dad::nccl::kLong).ok());
      EXPECT_EQ(values, std::vector<float>(4, 3));
    });
  }
  dad::ReleasePassed();
  EXPECT_EQ(dad::fake_gpu::LiveEvents(), 0);
  EXPECT_EQ(dad::fake_gpu::LiveStreams(), 0);
}

}  // namespace
}  // namespace dad_torch
