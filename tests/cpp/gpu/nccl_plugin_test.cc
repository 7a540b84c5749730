// libdad_nccl.so as the core opens it, with the fake in place of CUDA and NCCL, or with nothing.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dad/device.h"
#include "dad/engine.h"
#include "fake_gpu.h"
#include "nccl_fixture.h"
#include "transport/registry.h"

namespace dad::nccl {
namespace {

class NcclPluginTest : public NcclTest {
 protected:
  void SetUp() override {
    NcclTest::SetUp();
    std::string pattern = (std::filesystem::temp_directory_path() / "dad_test_XXXXXX").string();
    directory_ = mkdtemp(pattern.data());
    Use(DAD_FAKE_GPU);
  }
  void TearDown() override {
    unsetenv("DAD_CUDART_LIBRARY");
    unsetenv("DAD_NCCL_LIBRARY");
    std::filesystem::remove_all(directory_);
    NcclTest::TearDown();
  }

  static void Use(const char* library) {
    setenv("DAD_CUDART_LIBRARY", library, 1);
    setenv("DAD_NCCL_LIBRARY", library, 1);
  }

  Result<std::unique_ptr<Transport>> Connect(int rank) {
    World world;
    world.rank = world.local_rank = rank;
    world.size = world.local_size = 2;
    world.rendezvous = "file://" + directory_;
    world.plugin_dir = DAD_PLUGIN_DIR;
    Options options;
    options.start_timeout_seconds = 20;
    return ConnectTransport("nccl", world, options);
  }

  std::string directory_;
};

TEST_F(NcclPluginTest, OpensWhereNeitherCudaNorNcclIs) {
  const Status status = PluginAvailable("nccl", DAD_PLUGIN_DIR);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST_F(NcclPluginTest, ConnectWithoutTheLibrariesSaysWhatIsMissing) {
  Use("/nowhere/libgpu.so");
  std::thread other([&] { EXPECT_FALSE(Connect(1).ok()); });
  const Status status = Connect(0).status();
  other.join();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
  EXPECT_NE(status.message().find("/nowhere/libgpu.so"), std::string::npos) << status.message();
}

TEST_F(NcclPluginTest, CollectivesOfATransportThatTheCoreHasConnected) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      Result<std::unique_ptr<Transport>> transport = Connect(rank);
      ASSERT_TRUE(transport.ok()) << transport.status().ToString();
      EXPECT_EQ(transport.value()->name(), "nccl");
      const std::vector<int> all{0, 1};
      auto group = transport.value()->device_collectives()->MakeGroup(0, all, kLong);
      ASSERT_TRUE(group.ok()) << group.status().ToString();
      auto tensor = Floats({1, 2}, rank);
      ExpectDone(group.value()->AllReduce(tensor.view, tensor.view, ReduceOp::kSum, kLong));
      EXPECT_EQ(tensor.values, (std::vector<float>{2, 4}));
      EXPECT_TRUE(transport.value()->Barrier(kLong).ok());
      group.value().reset();
      EXPECT_TRUE(transport.value()->Barrier(kLong).ok());
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// An engine over gloo: NCCL is put beside it where every rank has it.
class DeviceStartTest : public NcclPluginTest {
 protected:
  // Sums a tensor on each rank's device.
  void SumOverTwo() {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        World world;
        world.rank = world.local_rank = rank;
        world.size = world.local_size = 2;
        world.rendezvous = "file://" + directory_;
        world.plugin_dir = DAD_PLUGIN_DIR;
        Options options;
        options.start_timeout_seconds = 20;
        Result<std::unique_ptr<Engine>> engine = Engine::Create(world, options);
        ASSERT_TRUE(engine.ok()) << engine.status().ToString();
        auto tensor = Floats({1, 2}, rank);
        Request request;
        request.name = "sum";
        request.tensors.emplace_back();
        request.tensors[0].input = request.tensors[0].output = tensor.view;
        auto ticket = engine.value()->Submit(std::move(request));
        const Status status = ticket->Wait(kLong);
        ASSERT_TRUE(status.ok()) << status.ToString();
        ASSERT_TRUE(WaitForEvent(rank, ticket->done_event(), kLong).ok());
        EXPECT_EQ(tensor.values, (std::vector<float>{2, 4}));
        ticket.reset();
      });
    }
    for (std::thread& rank : ranks) rank.join();
    ReleasePassed();
  }
};

TEST_F(DeviceStartTest, NcclComesBesideGlooWhereAllRanksHaveIt) {
  SumOverTwo();
  EXPECT_EQ(fake_gpu::Count("ncclAllReduce"), 2);
}

TEST_F(DeviceStartTest, WithoutNcclTensorsGoByWayOfTheHost) {
  setenv("DAD_NCCL_LIBRARY", "/nowhere/libnccl.so", 1);
  SumOverTwo();
  EXPECT_EQ(fake_gpu::Count("ncclAllReduce"), 0);
  EXPECT_EQ(fake_gpu::Count("cudaMemcpyAsync"), 4);
}

TEST_F(DeviceStartTest, ADriverWithoutEnoughDevicesIsNotUsedByNccl) {
  fake_gpu::SetDeviceCount(0);
  Result<void*> symbol = FindInPlugin("nccl", DAD_PLUGIN_DIR, "dad_plugin_usable");
  ASSERT_TRUE(symbol.ok());
  const auto usable = reinterpret_cast<const char* (*)(int)>(symbol.value());
  EXPECT_NE(std::string(usable(0)), "");
  fake_gpu::SetDeviceCount(1);  // a launcher has shown each process its own
  EXPECT_EQ(std::string(usable(3)), "");
  fake_gpu::SetDeviceCount(2);
  EXPECT_NE(std::string(usable(3)), "");
}

}  // namespace
}  // namespace dad::nccl
