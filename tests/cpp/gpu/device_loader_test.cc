// How the libraries of the GPU are looked for, and what is said when they are not there.
#include <gtest/gtest.h>

#include "device/cuda_api.h"
#include "device/shared_library.h"
#include "fake_gpu.h"
#include "transport/nccl/nccl_api.h"

namespace dad {
namespace {

class DeviceLoaderTest : public testing::Test {
 protected:
  void SetUp() override { fake_gpu::Reset(); }
  void TearDown() override { fake_gpu::Reset(); }
};

TEST_F(DeviceLoaderTest, MissingLibraryComesWithTheCommandThatBringsIt) {
  const Result<SharedLibrary> library =
      SharedLibrary::Open({"the flux runtime", "", {"libflux.so.7"}, "pip install flux"});
  ASSERT_EQ(library.status().code(), StatusCode::kUnavailable);
  const std::string message = library.status().message();
  EXPECT_NE(message.find("the flux runtime"), std::string::npos) << message;
  EXPECT_NE(message.find("libflux.so.7"), std::string::npos) << message;
  EXPECT_NE(message.find("pip install flux"), std::string::npos) << message;
}

TEST_F(DeviceLoaderTest, AFileThatIsNamedIsTheOnlyOneTried) {
  const Result<CudaApi> cuda = LoadCuda("/nowhere/libcudart.so");
  ASSERT_EQ(cuda.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(cuda.status().message().find("/nowhere/libcudart.so"), std::string::npos);
}

TEST_F(DeviceLoaderTest, LibraryWithoutTheFunctionsIsRefused) {
  const Result<CudaApi> cuda = LoadCuda("libm.so.6");
  ASSERT_EQ(cuda.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(cuda.status().message().find("cudaGetErrorString"), std::string::npos);
  EXPECT_EQ(nccl::LoadNccl("libm.so.6").status().code(), StatusCode::kUnavailable);
}

TEST_F(DeviceLoaderTest, ThePathOfAFakeIsTaken) {
  const Result<CudaApi> cuda = LoadCuda(DAD_FAKE_GPU);
  ASSERT_TRUE(cuda.ok()) << cuda.status().ToString();
  const Result<int> devices = CountCudaDevices(cuda.value());
  ASSERT_TRUE(devices.ok());
  EXPECT_EQ(devices.value(), 8);
  const Result<nccl::NcclApi> nccl = nccl::LoadNccl(DAD_FAKE_GPU);
  ASSERT_TRUE(nccl.ok()) << nccl.status().ToString();
  EXPECT_EQ(nccl::VersionText(nccl.value().version), "2.32.3");
}

TEST_F(DeviceLoaderTest, NoDriverAndNoDeviceAreToldApart) {
  const Result<CudaApi> cuda = LoadCuda(DAD_FAKE_GPU);
  ASSERT_TRUE(cuda.ok());
  fake_gpu::SetDeviceCount(0);
  EXPECT_NE(CountCudaDevices(cuda.value()).status().message().find("CUDA_VISIBLE_DEVICES"),
            std::string::npos);
  fake_gpu::SetDriver(false);
  const Status status = CountCudaDevices(cuda.value()).status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("driver"), std::string::npos) << status.message();
}

TEST_F(DeviceLoaderTest, OldNcclIsRefusedWithItsVersion) {
  fake_gpu::SetNcclVersion(21312);
  const Status status = nccl::LoadNccl(DAD_FAKE_GPU).status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("2.13.12"), std::string::npos) << status.message();
}

// Whatever is on this machine: with neither driver nor device the real ones answer politely.
TEST_F(DeviceLoaderTest, TheMachinesOwnLibrariesAnswerOrAreAbsentPolitely) {
  const Result<CudaApi> cuda = LoadCuda();
  if (!cuda.ok()) {
    EXPECT_EQ(cuda.status().code(), StatusCode::kUnavailable);
    GTEST_SKIP() << cuda.status().message();
  }
  const Result<int> devices = CountCudaDevices(cuda.value());
  EXPECT_TRUE(devices.ok() || devices.status().code() == StatusCode::kUnavailable);
}

TEST_F(DeviceLoaderTest, TheGuardPutsTheDeviceBack) {
  const Result<CudaApi> cuda = LoadCuda(DAD_FAKE_GPU);
  ASSERT_TRUE(cuda.ok());
  ASSERT_EQ(cuda.value().SetDevice(2), kCudaSuccess);
  int device = -1;
  {
    const CudaDeviceGuard guard(cuda.value(), 5);
    cuda.value().GetDevice(&device);
    EXPECT_EQ(device, 5);
  }
  cuda.value().GetDevice(&device);
  EXPECT_EQ(device, 2);
}

}  // namespace
}  // namespace dad
