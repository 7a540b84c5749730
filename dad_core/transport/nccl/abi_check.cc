// Compiled only if the headers of CUDA and NCCL exist: checks that device/cuda_api.h and nccl_api.h
// declare the functions and constants of the headers. Generates no code.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>

#include "device/cuda_api.h"
#include "device/same_call.h"
#include "transport/nccl/nccl_api.h"

namespace dad {
namespace {

// Overloaded functions have to be selected by their type.
static_assert(SameCall<decltype(CudaApi::MallocAsync),
                       decltype(static_cast<cudaError_t (*)(void**, size_t, cudaStream_t)>(
                           &cudaMallocAsync))>::value);
static_assert(SameCall<decltype(CudaApi::HostAlloc),
                       decltype(static_cast<cudaError_t (*)(void**, size_t, unsigned)>(
                           &cudaHostAlloc))>::value);
#define DAD_CHECK(name, result, parameters) \
  static_assert(SameCall<decltype(CudaApi::name), decltype(&cuda##name)>::value, "cuda" #name);
DAD_CUDA_PLAIN(DAD_CHECK)
#undef DAD_CHECK
#define DAD_CHECK(name, result, parameters)                                            \
  static_assert(SameCall<decltype(nccl::NcclApi::name), decltype(&nccl##name)>::value, \
                "nccl" #name);
DAD_NCCL_FUNCTIONS(DAD_CHECK)
#undef DAD_CHECK

static_assert(kCudaSuccess == cudaSuccess && kCudaNotReady == cudaErrorNotReady);
static_assert(kCudaNoMemory == cudaErrorMemoryAllocation);
static_assert(kCudaStreamNonBlocking == cudaStreamNonBlocking);
static_assert(kCudaEventDisableTiming == cudaEventDisableTiming);
static_assert(kCudaMemcpyDefault == cudaMemcpyDefault);
static_assert(kCudaMultiprocessors == cudaDevAttrMultiProcessorCount);
static_assert(kCudaComputeMajor == cudaDevAttrComputeCapabilityMajor);
static_assert(kCudaComputeMinor == cudaDevAttrComputeCapabilityMinor);
static_assert(nccl::kScalarHostImmediate == ncclScalarHostImmediate);
static_assert(nccl::kSuccess == ncclSuccess && nccl::kInProgress == ncclInProgress);
static_assert(nccl::kUint8 == ncclUint8 && ncclInt8 == 0 && ncclInt32 == 2 && ncclInt64 == 4);
static_assert(ncclFloat16 == 6 && ncclFloat32 == 7 && ncclFloat64 == 8 && ncclBfloat16 == 9);
static_assert(ncclSum == 0 && ncclProd == 1 && ncclMax == 2 && ncclMin == 3 && ncclAvg == 4);
static_assert(sizeof(nccl::UniqueId) == sizeof(ncclUniqueId));
static_assert(offsetof(nccl::Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(nccl::Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(nccl::Config, blocking) == offsetof(ncclConfig_t, blocking));

}  // namespace
}  // namespace dad
