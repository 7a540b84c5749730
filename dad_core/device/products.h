// Products of matrices in device memory, by cuBLAS: row-major, on a stream, nothing waits. The
// product of a layer's factors, Dᵀ A, is one of them.
#pragma once

#include <cstdint>

#include "device/cublas_api.h"

namespace dad {

template <typename T>
struct DeviceMatrix {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;    // adjacent in memory
  int64_t stride = 0;  // from row to row; 0: cols
};

// One per stream; not thread-safe.
class DeviceProducts {
 public:
  static Result<DeviceProducts> Make(const CublasApi& api, CudaStream stream);
  ~DeviceProducts();
  DeviceProducts(DeviceProducts&& other) noexcept;
  DeviceProducts& operator=(DeviceProducts&&) = delete;

  // C = alpha A B + beta C, with A or B transposed first. kInvalidArgument if the shapes do not
  // fit.
  template <typename T>
  Status Multiply(DeviceMatrix<const T> a, bool transpose_a, DeviceMatrix<const T> b,
                  bool transpose_b, DeviceMatrix<T> c, T alpha = T(1), T beta = T(0));

 private:
  DeviceProducts(const CublasApi& api, CublasHandle handle) : api_(api), handle_(handle) {}

  CublasApi api_;
  CublasHandle handle_;
};

}  // namespace dad
