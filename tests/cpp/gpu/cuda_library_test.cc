// libdad_cuda.so as nvcc made it. Here it can only be opened and asked: without a driver every
// launch must come back with an error, and nothing may crash.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "codec/cuda/kernels.h"

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
  for (const char* name : {"copy_f32_f32", "copy_f32_f16", "copy_f32_bf16", "copy_f16_f32",
                           "copy_f16_f16", "copy_bf16_f32", "copy_bf16_bf16", "copy_f64_f64",
                           "check_int8", "offsets", "check_words", "rice_cost", "rice_choose",
                           "rice_block_bits", "rice_offsets", "rice_write", "pack_codes", "pack"}) {
    EXPECT_NE(Find(name), nullptr) << name;
  }
  for (const char* name : {"quantise_int8_", "dequantise_int8_", "quantise_int4_",
                           "dequantise_int4_", "accumulate_", "gather_", "top_", "encode_vgc_",
                           "encode_strom_", "add_words_", "orthonormalise_", "small_svd_"}) {
    for (const char* type : {"f32", "f64"}) {
      EXPECT_NE(Find(std::string(name) + type), nullptr) << name << type;
    }
  }
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
}

}  // namespace
}  // namespace dad::cuda
