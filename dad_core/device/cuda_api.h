// The CUDA runtime as a table of function pointers, so that nothing here is linked to it, and
// tests can put a fake in its place. The types are those of cuda_runtime_api.h, without it;
// transport/nccl/abi_check.cc compares them where that header is.
//
// FreeHost is the only function in this table that may wait for the device, so code that has only
// the table cannot synchronise by accident.
#pragma once

#include <cstddef>
#include <string>

#include "dad/export.h"
#include "dad/status.h"

namespace dad {

using CudaStream = struct CUstream_st*;
using CudaEvent = struct CUevent_st*;
using CudaError = int;  // an enum there

inline constexpr CudaError kCudaSuccess = 0;
inline constexpr CudaError kCudaNoMemory = 2;
inline constexpr CudaError kCudaNotReady = 600;
inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventDisableTiming = 2;
inline constexpr int kCudaMemcpyDefault = 4;
// Attributes of a device.
inline constexpr int kCudaMultiprocessors = 16;
inline constexpr int kCudaComputeMajor = 75;
inline constexpr int kCudaComputeMinor = 76;

// X(name without "cuda", result, parameters)
#define DAD_CUDA_PLAIN(X)                                                  \
  X(GetErrorString, const char*, (CudaError))                              \
  X(GetLastError, CudaError, ())                                           \
  X(DriverGetVersion, CudaError, (int*))                                   \
  X(RuntimeGetVersion, CudaError, (int*))                                  \
  X(GetDeviceCount, CudaError, (int*))                                     \
  X(GetDevice, CudaError, (int*))                                          \
  X(SetDevice, CudaError, (int))                                           \
  X(DeviceGetAttribute, CudaError, (int*, int, int))                       \
  X(DeviceGetStreamPriorityRange, CudaError, (int*, int*))                 \
  X(StreamCreateWithPriority, CudaError, (CudaStream*, unsigned, int))     \
  X(StreamDestroy, CudaError, (CudaStream))                                \
  X(StreamWaitEvent, CudaError, (CudaStream, CudaEvent, unsigned))         \
  X(EventCreateWithFlags, CudaError, (CudaEvent*, unsigned))               \
  X(EventRecord, CudaError, (CudaEvent, CudaStream))                       \
  X(EventQuery, CudaError, (CudaEvent))                                    \
  X(EventDestroy, CudaError, (CudaEvent))                                  \
  X(MemcpyAsync, CudaError, (void*, const void*, size_t, int, CudaStream)) \
  X(MemsetAsync, CudaError, (void*, int, size_t, CudaStream))              \
  X(FreeAsync, CudaError, (void*, CudaStream))                             \
  X(FreeHost, CudaError, (void*))
// Those that cuda_runtime.h overloads for C++.
#define DAD_CUDA_OVERLOADED(X)                            \
  X(MallocAsync, CudaError, (void**, size_t, CudaStream)) \
  X(HostAlloc, CudaError, (void**, size_t, unsigned))

#define DAD_CUDA_FUNCTIONS(X) DAD_CUDA_PLAIN(X) DAD_CUDA_OVERLOADED(X)

struct DAD_EXPORT CudaApi {
#define DAD_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
  DAD_CUDA_FUNCTIONS(DAD_MEMBER)
#undef DAD_MEMBER
  std::string library;  // what was opened

  // An error that names the call; clears it, so that the next call does not report it again. A
  // lack of memory is kUnavailable: the next time there may be some.
  Status Check(CudaError error, const char* call) const;
};

// `path`: this file and no other. Empty: the runtime that the process has loaded, or the
// system's, of CUDA 13 or 12.
DAD_EXPORT Result<CudaApi> LoadCuda(const std::string& path = "");

// The one of this process, opened when first asked for: DAD_CUDART_LIBRARY names a file to take
// instead of what is found. It stays until the process ends.
Result<const CudaApi*> ProcessCuda();

// How many devices; kUnavailable, saying what is missing, if there is no driver or no device.
DAD_EXPORT Result<int> CountCudaDevices(const CudaApi& cuda);

// The device of a process: the one of its local rank, or the only one that it sees, since a
// launcher may show each process its own. kUnavailable says what is missing.
DAD_EXPORT Result<int> DeviceOfRank(const CudaApi& cuda, int local_rank);

// Makes `device` this thread's current one, and puts back what it was.
class DAD_EXPORT CudaDeviceGuard {
 public:
  CudaDeviceGuard(const CudaApi& cuda, int device);
  ~CudaDeviceGuard();
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  const CudaApi& cuda_;
  int previous_ = -1;
};

}  // namespace dad
