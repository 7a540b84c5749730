// libdad_cuda.so as nvcc made it. Here it can only be opened and asked: without a driver every
// launch must come back with an error, and nothing may crash.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "codec/cuda/kernel_list.h"

namespace dad::cuda {
namespace {

class CudaLibraryTest : public testing::Test {
 protected:
  void SetUp() override {
#if defined(DAD_CUDA_LIBRARY)
    library_ = dlopen(DAD_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
#else
    GTEST_SKIP() << "built without nvcc";
#endif
  }
  void TearDown() override {
    if (library_ != nullptr) dlclose(library_);
  }
  using Entry = int (*)(const void* args, void* stream);
  Entry Find(const std::string& name) {
    return reinterpret_cast<Entry>(dlsym(library_, ("dad_cuda_" + name).c_str()));
  }
  void* library_ = nullptr;
};

TEST_F(CudaLibraryTest, EveryKernelHasItsEntryPoint) {
#define DAD_NAME(name, ...) #name,
  for (const char* name : {DAD_CUDA_KERNELS(DAD_NAME)}) EXPECT_NE(Find(name), nullptr) << name;
#undef DAD_NAME
}

TEST_F(CudaLibraryTest, NothingToDoIsNoError) {
  QuantiseInt8Kernel<float>::Args args{};
  args.bucket = 256;
  EXPECT_EQ(Find("quantise_int8_f32")(&args, nullptr), 0);
}

// With a GPU these launches would work: offsets of no blocks writes one number.
TEST_F(CudaLibraryTest, ALaunchWithoutADriverIsAnError) {
  if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) != nullptr) GTEST_SKIP() << "there is a driver";
  OffsetsKernel::Args args{};
  EXPECT_NE(Find("offsets")(&args, nullptr), 0);
  EXPECT_NE(reinterpret_cast<int (*)()>(dlsym(library_, "dad_cuda_check"))(), 0);
}

}  // namespace
}  // namespace dad::cuda
