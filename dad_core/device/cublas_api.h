// cuBLAS as a table of function pointers, opened at run time like the CUDA runtime. The types are
// those of cublas_v2.h, without it; cublas_abi_check.cc compares them where that header is.
#pragma once

#include <string>

#include "dad/status.h"
#include "device/cuda_api.h"

namespace dad {

using CublasHandle = struct cublasContext*;
using CublasStatus = int;     // enums there
using CublasOperation = int;  // 0: as it is, 1: transposed

inline constexpr CublasStatus kCublasSuccess = 0;

// X(symbol without "cublas", member, parameters)
#define DAD_CUBLAS_FUNCTIONS(X)                                                                   \
  X(Create_v2, Create, (CublasHandle*))                                                           \
  X(Destroy_v2, Destroy, (CublasHandle))                                                          \
  X(GetProperty, GetProperty, (int, int*)) /* 0, 1, 2: of the version */                          \
  X(SetStream_v2, SetStream, (CublasHandle, CudaStream))                                          \
  X(Sgemm_v2, Sgemm,                                                                              \
    (CublasHandle, CublasOperation, CublasOperation, int, int, int, const float*, const float*,   \
     int, const float*, int, const float*, float*, int))                                          \
  X(Dgemm_v2, Dgemm,                                                                              \
    (CublasHandle, CublasOperation, CublasOperation, int, int, int, const double*, const double*, \
     int, const double*, int, const double*, double*, int))

struct CublasApi {
#define DAD_MEMBER(symbol, name, parameters) CublasStatus(*name) parameters = nullptr;
  DAD_CUBLAS_FUNCTIONS(DAD_MEMBER)
#undef DAD_MEMBER
  std::string library;
};

// `path`: this file and no other. Empty: the one that the process has loaded, or the system's.
Result<CublasApi> LoadCublas(const std::string& path = "");

}  // namespace dad
