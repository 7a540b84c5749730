// The C face of libdad_cuda.so: puts a kernel of kernels.h on a stream. Returns a cudaError_t of
// the launch; the kernel's own errors come out when the stream is asked. Nothing waits here.
#include <cuda_runtime_api.h>

#include "codec/cuda/kernels.h"
#include "codec/cuda/rice_kernels.h"
#include "codec/cuda/small_kernels.h"

namespace dad::cuda {
namespace {

template <typename Kernel>
__global__ void __launch_bounds__(kThreads) Run(const typename Kernel::Args args) {
  __shared__ typename Kernel::Shared shared;
  const Where at{static_cast<int64_t>(blockIdx.x), static_cast<int>(threadIdx.x)};
#pragma unroll
  for (int phase = 0; phase < Kernel::kPhases; ++phase) {
    if (phase > 0) __syncthreads();
    Kernel::Phase(phase, at, shared, args);
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

DAD_KERNEL(copy_f32_f32, CopyKernel<float, float>)
DAD_KERNEL(copy_f32_f16, CopyKernel<float, Half>)
DAD_KERNEL(copy_f32_bf16, CopyKernel<float, BFloat16>)
DAD_KERNEL(copy_f16_f32, CopyKernel<Half, float>)
DAD_KERNEL(copy_f16_f16, CopyKernel<Half, Half>)
DAD_KERNEL(copy_bf16_f32, CopyKernel<BFloat16, float>)
DAD_KERNEL(copy_bf16_bf16, CopyKernel<BFloat16, BFloat16>)
DAD_KERNEL(copy_f64_f64, CopyKernel<double, double>)
DAD_KERNEL(check_int8, CheckInt8Kernel)
DAD_KERNEL(offsets, OffsetsKernel)
DAD_KERNEL(check_words, CheckWordsKernel)
DAD_KERNEL(rice_cost, RiceCostKernel)
DAD_KERNEL(rice_choose, RiceChooseKernel)
DAD_KERNEL(rice_block_bits, RiceBlockBitsKernel)
DAD_KERNEL(rice_offsets, RiceOffsetsKernel)
DAD_KERNEL(rice_write, RiceWriteKernel)
DAD_KERNEL(pack_codes, PackCodesKernel)
#define DAD_KERNELS(type, T)                                  \
  DAD_KERNEL(quantise_int8_##type, QuantiseInt8Kernel<T>)     \
  DAD_KERNEL(dequantise_int8_##type, DequantiseInt8Kernel<T>) \
  DAD_KERNEL(quantise_int4_##type, QuantiseInt4Kernel<T>)     \
  DAD_KERNEL(dequantise_int4_##type, DequantiseInt4Kernel<T>) \
  DAD_KERNEL(accumulate_##type, AccumulateKernel<T>)          \
  DAD_KERNEL(gather_##type, GatherKernel<T>)                  \
  DAD_KERNEL(top_##type, TopKernel<T>)                        \
  DAD_KERNEL(encode_vgc_##type, EncodeVgcKernel<T>)           \
  DAD_KERNEL(encode_strom_##type, EncodeStromKernel<T>)       \
  DAD_KERNEL(add_words_##type, AddWordsKernel<T>)             \
  DAD_KERNEL(orthonormalise_##type, OrthonormaliseKernel<T>)  \
  DAD_KERNEL(small_svd_##type, SmallSvdKernel<T>)
DAD_KERNELS(f32, float)
DAD_KERNELS(f64, double)

// What the library was compiled with, e.g. 13000.
extern "C" __attribute__((visibility("default"))) int dad_cuda_version() { return CUDART_VERSION; }

}  // namespace dad::cuda
