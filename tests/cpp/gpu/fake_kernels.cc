// A stand-in for libdad_cuda.so, for tests: the same entries, but a kernel is emulated on the host
// (emulate.h) when its turn on a stream of the fake comes. It shows what the exchanges put on the
// stream, in which order, and what comes out; no GPU runs any of it.
#include <cstdlib>

#include "codec/cuda/kernel_list.h"
#include "emulate.h"
#include "fake_gpu.h"

namespace dad::cuda {
namespace {

template <typename Kernel>
int Launch(const char* name, const void* args, void* stream) {
  // As on a device, arguments are taken when it is put on the stream.
  const auto taken = *static_cast<const typename Kernel::Args*>(args);
  if (Kernel::Blocks(taken) == 0) return 0;
  return fake_gpu::Enqueue(name, stream, [taken] { Emulate<Kernel>(taken); });
}

}  // namespace

#define DAD_KERNEL(name, ...)                                                                      \
  extern "C"                                                                                       \
      __attribute__((visibility("default"))) int dad_cuda_##name(const void* args, void* stream) { \
    return Launch<__VA_ARGS__>("dad_cuda_" #name, args, stream);                                   \
  }
DAD_CUDA_KERNELS(DAD_KERNEL)

extern "C" __attribute__((visibility("default"))) int dad_cuda_version() { return 13000; }
// As with an older driver where the test says so: cudaErrorInsufficientDriver.
extern "C" __attribute__((visibility("default"))) int dad_cuda_check() {
  return std::getenv("DAD_FAKE_OLD_DRIVER") != nullptr ? 35 : 0;
}

}  // namespace dad::cuda
