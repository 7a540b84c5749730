// torch's side of device tensors, with a torch for the CPU: the test gives torch a device guard and
// an allocator for CUDA that play on the recording fake. Shows that the ops record, wait and
// allocate on the streams that torch calls current; not that a CUDA build of torch does the same.
#include "device_stream.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>

#include "device_job.h"
#include "tensor_adapter.h"

namespace dad_torch {
namespace {

using dad::CudaEvent;
using dad::CudaStream;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, int64_t> current_streams;

const dad::CudaApi& Cuda() { return *dad::ProcessCuda().value(); }
CudaStream Raw(const c10::Stream& stream) { return reinterpret_cast<CudaStream>(stream.id()); }

c10::Stream TorchStream(const dad::UserStream& stream) {
  return c10::Stream(c10::Stream::UNSAFE,
                     c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(stream.device())),
                     reinterpret_cast<int64_t>(stream.get()));
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  FakeGuard() = default;
  explicit FakeGuard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {c10::kCUDA, std::exchange(current_device, device.index())};
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      CudaEvent made = nullptr;
      (void)Cuda().EventCreateWithFlags(&made, 0);
      *event = made;
    }
    (void)Cuda().EventRecord(static_cast<CudaEvent>(*event), Raw(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    (void)Cuda().StreamWaitEvent(Raw(stream), static_cast<CudaEvent>(event), 0);
  }
  bool queryEvent(void* event) const override {
    return Cuda().EventQuery(static_cast<CudaEvent>(event)) == dad::kCudaSuccess;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    (void)Cuda().EventDestroy(static_cast<CudaEvent>(event));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

at::Tensor OnDevice(
    void* data, at::IntArrayRef sizes, int device,
    const std::function<void(void*)>& free = [](void*) {}) {
  const c10::Device where(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  return at::for_blob(data, sizes)
      .deleter(free)
      .target_device(where)
      .options(at::TensorOptions().dtype(at::kFloat).device(where))
      .make_tensor();
}

int64_t allocated_on = 0;
at::Tensor Empty(at::IntArrayRef sizes, std::optional<at::ScalarType>, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  allocated_on = current_streams[device->index()];
  return OnDevice(std::malloc(static_cast<size_t>(c10::multiply_integers(sizes)) * 4), sizes,
                  device->index(), [](void* data) { std::free(data); });
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("empty.memory_format", &Empty); }

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
  EXPECT_EQ(allocated_on, reinterpret_cast<int64_t>(stream.get()));
  EXPECT_EQ(current_streams[2], 0);  // and the thread's own stream is what it was
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
