// A step of subspace iteration in device memory: E ≈ P Qᵀ of rank r, from a warm start Q. Tall
// products by cuBLAS, r x r matters by the kernels of codec/cuda/small_kernels.h. Everything is
// put on one stream; nothing waits and nothing is asked of the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/products.h"

namespace dad {

// Entries of libdad_cuda.so for one type: they take the kernel's Args and a stream, and give a
// cudaError_t.
struct SmallKernels {
  using Entry = int (*)(const void* args, void* stream);
  Entry orthonormalise = nullptr;
  Entry small_svd = nullptr;
};

template <typename T>
struct SubspaceStep {
  DeviceMatrix<const T> e;       // m x n
  DeviceMatrix<T> q;             // n x r: the warm start, then Eᵀ P
  DeviceMatrix<T> p;             // m x r: gets orthonormal columns
  T* singular_values = nullptr;  // r, falling: of P Qᵀ. Null: P and Q are not turned to them
  void* workspace = nullptr;     // SubspaceBytes
};

// Of device memory, for m x n at rank r.
template <typename T>
size_t SubspaceBytes(int64_t m, int64_t n, int64_t r);

// P = orthonormal basis of E Q, Q = Eᵀ P; with singular values both are turned so that P diag(s) V
// is the singular value decomposition of P Qᵀ. kInvalidArgument for r > 64.
template <typename T>
Status IterateSubspace(const CudaApi& cuda, DeviceProducts& products, const SmallKernels& kernels,
                       CudaStream stream, const SubspaceStep<T>& step);

}  // namespace dad
