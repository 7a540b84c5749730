// The C face of libdad_cuda.so: puts a kernel of kernel_list.h on a stream. Returns a cudaError_t
// of the launch; the kernel's own errors come out when the stream is asked. Nothing waits here.
#include <cuda_runtime_api.h>

#include "codec/cuda/kernel_list.h"

namespace dad::cuda {
namespace {

template <typename Kernel>
__global__ void __launch_bounds__(kThreads) Run(const typename Kernel::Args args) {
  __shared__ typename Kernel::Shared shared;
  const Where at{static_cast<int64_t>(blockIdx.x), static_cast<int>(threadIdx.x)};
  if constexpr (HasFixedPhases<Kernel>::kValue) {
#pragma unroll
    for (int phase = 0; phase < Kernel::kPhases; ++phase) {
      if (phase > 0) __syncthreads();
      Kernel::Phase(phase, at, shared, args);
    }
  } else {
    const int phases = Kernel::Phases(args);
#pragma unroll 1
    for (int phase = 0; phase < phases; ++phase) {
      if (phase > 0) __syncthreads();
      Kernel::Phase(phase, at, shared, args);
    }
  }
}

template <typename Kernel>
int Launch(const void* args, void* stream) {
  constexpr int64_t kMostBlocks = 0x7fffffff;
  const auto& typed = *static_cast<const typename Kernel::Args*>(args);
  const int64_t blocks = Kernel::Blocks(typed);
  if (blocks == 0) return cudaSuccess;
  if (blocks < 0 || blocks > kMostBlocks) return cudaErrorInvalidValue;
  Run<Kernel>
      <<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(typed);
  return cudaGetLastError();
}

}  // namespace

// `args` is the kernel's Args; `stream` a cudaStream_t.
#define DAD_KERNEL(name, ...)                                                                      \
  extern "C"                                                                                       \
      __attribute__((visibility("default"))) int dad_cuda_##name(const void* args, void* stream) { \
    return Launch<__VA_ARGS__>(args, stream);                                                      \
  }

DAD_CUDA_KERNELS(DAD_KERNEL)

// 0, or the cudaError_t that every launch would give: with a driver that is older than the runtime
// in this library, or with none.
extern "C" __attribute__((visibility("default"))) int dad_cuda_check() {
  int devices = 0;
  return cudaGetDeviceCount(&devices);
}

// What the library was compiled with, e.g. 13000.
extern "C" __attribute__((visibility("default"))) int dad_cuda_version() { return CUDART_VERSION; }

}  // namespace dad::cuda
