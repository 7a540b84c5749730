// Ranks as threads, each with a device of the fake, joined by the local transport for messages.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_gpu.h"
#include "transport/local/local_network.h"
#include "transport/nccl/nccl_transport.h"

namespace dad::nccl {

inline constexpr std::chrono::milliseconds kLong{20'000};
inline constexpr std::chrono::milliseconds kShort{150};

inline std::shared_ptr<Libraries> LoadFake() {
  auto libraries = std::make_shared<Libraries>();
  Result<CudaApi> cuda = LoadCuda(DAD_FAKE_GPU);
  Result<NcclApi> nccl = LoadNccl(DAD_FAKE_GPU);
  EXPECT_TRUE(cuda.ok() && nccl.ok());
  libraries->cuda = std::move(cuda).value();
  libraries->nccl = std::move(nccl).value();
  return libraries;
}

// "Device" memory with a view of it.
template <typename T>
struct DeviceTensor {
  std::vector<T> values;
  TensorView view;

  DeviceTensor(std::vector<T> initial, DType dtype, int device) : values(std::move(initial)) {
    view.data = values.data();
    view.dtype = dtype;
    view.shape = {static_cast<int64_t>(values.size())};
    view.device = DeviceType::kCuda;
    view.device_index = device;
  }
};
inline DeviceTensor<float> Floats(std::vector<float> values, int device) {
  return {std::move(values), DType::kFloat32, device};
}
inline DeviceTensor<uint8_t> Bytes(std::vector<uint8_t> values, int device) {
  return {std::move(values), DType::kUint8, device};
}

class NcclTest : public testing::Test {
 protected:
  void SetUp() override { fake_gpu::Reset(); }
  void TearDown() override {
    EXPECT_EQ(fake_gpu::LiveComms(), 0);
    EXPECT_EQ(fake_gpu::LiveStreams(), 0);
    EXPECT_EQ(fake_gpu::LiveEvents(), 0);
    fake_gpu::Reset();
  }

  // Calls body(rank, transport) on a thread per rank.
  void RunRanks(int size, const std::function<void(int, NcclTransport&)>& body) {
    network_ = std::make_unique<LocalNetwork>(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        std::unique_ptr<Transport> control = network_->Connect(rank);
        auto transport = NcclTransport::Connect(LoadFake(), rank, control.get(), kLong);
        ASSERT_TRUE(transport.ok()) << transport.status().ToString();
        (void)control.release();
        body(rank, *transport.value());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // The same, with the group of all ranks.
  void RunGroup(int size, const std::function<void(DeviceGroup&)>& body) {
    RunRanks(size, [&](int, NcclTransport& transport) {
      std::vector<int> all(static_cast<size_t>(size));
      std::iota(all.begin(), all.end(), 0);
      auto group = transport.MakeGroup(0, all, kLong);
      ASSERT_TRUE(group.ok()) << group.status().ToString();
      body(*group.value());
      // Nobody leaves while another may still wait for it, or has not closed its group: a rank
      // that is gone is a lost one.
      EXPECT_TRUE(transport.Barrier(kLong).ok());
      group.value().reset();
      EXPECT_TRUE(transport.Barrier(kLong).ok());
    });
  }

  static void ExpectDone(const DeviceGroup::Work& work) {
    ASSERT_TRUE(work.ok()) << work.status().ToString();
    const Status status = work.value()->Wait(kLong);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }

  std::unique_ptr<LocalNetwork> network_;
};

}  // namespace dad::nccl
