#include "device/products.h"

#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

namespace dad {
namespace {

Status Check(CublasStatus status, const char* call) {
  if (status == kCublasSuccess) return Status::Ok();
  return Status::Aborted(std::string(call) + ": cuBLAS status " + std::to_string(status));
}

}  // namespace

Result<DeviceProducts> DeviceProducts::Make(const CublasApi& api, CudaStream stream) {
  CublasHandle handle = nullptr;
  DAD_RETURN_IF_ERROR(Check(api.Create(&handle), "cublasCreate"));
  DeviceProducts products(api, handle);
  DAD_RETURN_IF_ERROR(Check(api.SetStream(handle, stream), "cublasSetStream"));
  return products;
}

DeviceProducts::~DeviceProducts() {
  if (handle_ != nullptr) (void)api_.Destroy(handle_);
}

DeviceProducts::DeviceProducts(DeviceProducts&& other) noexcept
    : api_(other.api_), handle_(std::exchange(other.handle_, nullptr)) {}

// cuBLAS takes columns to be adjacent: to it our C is Cᵀ = op(B)ᵀ op(A)ᵀ, and each of our matrices
// its own transpose. So the two change places, and whether they are transposed stays.
template <typename T>
Status DeviceProducts::Multiply(DeviceMatrix<const T> a, bool transpose_a, DeviceMatrix<const T> b,
                                bool transpose_b, DeviceMatrix<T> c, T alpha, T beta) {
  const int64_t m = transpose_a ? a.cols : a.rows;
  const int64_t k = transpose_a ? a.rows : a.cols;
  const int64_t n = transpose_b ? b.rows : b.cols;
  if ((transpose_b ? b.cols : b.rows) != k || c.rows != m || c.cols != n) {
    return Status::InvalidArgument("a product of matrices that do not fit");
  }
  if (m == 0 || n == 0) return Status::Ok();
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  const auto lead = [](const auto& x) {
    return std::max<int64_t>(1, x.stride == 0 ? x.cols : x.stride);
  };
  for (const int64_t extent : {m, n, k, lead(a), lead(b), lead(c)}) {
    if (extent > kMost) return Status::InvalidArgument("a matrix too large for cuBLAS");
  }
  const auto gemm = [&] {
    if constexpr (std::is_same_v<T, float>) {
      return api_.Sgemm;
    } else {
      return api_.Dgemm;
    }
  }();
  return Check(
      gemm(handle_, transpose_b ? 1 : 0, transpose_a ? 1 : 0, static_cast<int>(n),
           static_cast<int>(m), static_cast<int>(k), &alpha, b.data, static_cast<int>(lead(b)),
           a.data, static_cast<int>(lead(a)), &beta, c.data, static_cast<int>(lead(c))),
      "cublasGemm");
}

template Status DeviceProducts::Multiply(DeviceMatrix<const float>, bool, DeviceMatrix<const float>,
                                         bool, DeviceMatrix<float>, float, float);
template Status DeviceProducts::Multiply(DeviceMatrix<const double>, bool,
                                         DeviceMatrix<const double>, bool, DeviceMatrix<double>,
                                         double, double);

}  // namespace dad
