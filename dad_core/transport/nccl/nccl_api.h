// NCCL as a table of function pointers: nothing is linked to it. The types are those of nccl.h,
// without it; abi_check.cc compares them where that header is.
#pragma once

#include <cstddef>
#include <string>

#include "dad/request.h"
#include "dad/status.h"
#include "dad/tensor_view.h"
#include "device/cuda_api.h"

namespace dad::nccl {

using Comm = struct ncclComm*;
using ResultCode = int;  // enums there
using DataType = int;
using RedOp = int;

inline constexpr ResultCode kSuccess = 0;
inline constexpr ResultCode kInProgress = 7;
inline constexpr DataType kUint8 = 1;
inline constexpr int kScalarHostImmediate = 1;
inline constexpr int kOldestVersion = 21400;  // from here on communicators need not block

struct UniqueId {
  char internal[128];
};

// The configuration as it was in NCCL 2.14; later ones fill in what it lacks.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kOldestVersion;
  int blocking = 0;
};

// X(name without "nccl", result, parameters)
#define DAD_NCCL_FUNCTIONS(X)                                                                   \
  X(GetVersion, ResultCode, (int*))                                                             \
  X(GetErrorString, const char*, (ResultCode))                                                  \
  X(GetUniqueId, ResultCode, (UniqueId*))                                                       \
  X(CommInitRankConfig, ResultCode, (Comm*, int, UniqueId, int, Config*))                       \
  X(CommFinalize, ResultCode, (Comm))                                                           \
  X(CommDestroy, ResultCode, (Comm))                                                            \
  X(CommAbort, ResultCode, (Comm))                                                              \
  X(CommGetAsyncError, ResultCode, (Comm, ResultCode*))                                         \
  X(GroupStart, ResultCode, ())                                                                 \
  X(GroupEnd, ResultCode, ())                                                                   \
  X(RedOpCreatePreMulSum, ResultCode, (RedOp*, void*, DataType, int, Comm))                     \
  X(AllReduce, ResultCode, (const void*, void*, size_t, DataType, RedOp, Comm, CudaStream))     \
  X(AllGather, ResultCode, (const void*, void*, size_t, DataType, Comm, CudaStream))            \
  X(Broadcast, ResultCode, (const void*, void*, size_t, DataType, int, Comm, CudaStream))       \
  X(Reduce, ResultCode, (const void*, void*, size_t, DataType, RedOp, int, Comm, CudaStream))   \
  X(ReduceScatter, ResultCode, (const void*, void*, size_t, DataType, RedOp, Comm, CudaStream)) \
  X(Send, ResultCode, (const void*, size_t, DataType, int, Comm, CudaStream))                   \
  X(Recv, ResultCode, (void*, size_t, DataType, int, Comm, CudaStream))

struct NcclApi {
#define DAD_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
  DAD_NCCL_FUNCTIONS(DAD_MEMBER)
#undef DAD_MEMBER
  std::string library;
  int version = 0;  // 23203 is 2.32.3
};

// `path`: exactly this file. Empty: the library that the process has loaded, or the system's.
Result<NcclApi> LoadNccl(const std::string& path = "");

std::string VersionText(int version);  // "2.32.3"

// NCCL's names for them; InvalidArgument for operations that it does not have, or would do
// differently from the CPU: the average of integers, Adasum, reductions of bool and int16.
Result<DataType> ToNccl(DType dtype);
Result<RedOp> ToNccl(ReduceOp op, DType dtype);

}  // namespace dad::nccl
