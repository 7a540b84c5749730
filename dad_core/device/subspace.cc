#include "device/subspace.h"

#include <algorithm>
#include <string>
#include <utility>

namespace dad {
namespace {

// As codec/cuda/small_kernels.h has them; codec is no room that this one may enter.
// tests/cpp/gpu/subspace_test.cc compares.
template <typename T>
struct OrthonormaliseArgs {
  int n;
  double tolerance;
  const T* gram;
  double* scratch;
  T* factor;
};
template <typename T>
struct SmallSvdArgs {
  int n;
  const T* gram;
  double* scratch;
  T* v;
  T* s;
};
constexpr int64_t kMostRank = 64;

// Below this part of its length squared a column's own direction is rounding.
template <typename T>
constexpr double kTolerance = sizeof(T) == 4 ? 1e-12 : 1e-26;

size_t Padded(size_t num_bytes) { return (num_bytes + 255) / 256 * 256; }

Status Check(int error, const char* kernel) {
  if (error == 0) return Status::Ok();
  return Status::Aborted(std::string(kernel) + ": CUDA error " + std::to_string(error));
}

template <typename T>
DeviceMatrix<const T> In(const DeviceMatrix<T>& matrix) {
  return {matrix.data, matrix.rows, matrix.cols};
}

// The pieces of the workspace.
template <typename T>
struct Pieces {
  DeviceMatrix<T> tall, gram, factor;
  double* scratch;
  size_t num_bytes;

  Pieces(void* workspace, int64_t m, int64_t n, int64_t r) {
    auto* at = static_cast<std::byte*>(workspace);
    size_t used = 0;
    const auto take = [&](size_t bytes) {
      std::byte* const piece = at == nullptr ? nullptr : at + used;
      used += Padded(bytes);
      return piece;
    };
    const auto square = static_cast<size_t>(r * r);
    const auto longest = static_cast<size_t>(std::max(m, n) * r);
    tall = {reinterpret_cast<T*>(take(longest * sizeof(T))), 0, r};
    gram = {reinterpret_cast<T*>(take(square * sizeof(T))), r, r};
    factor = {reinterpret_cast<T*>(take(square * sizeof(T))), r, r};
    scratch =
        reinterpret_cast<double*>(take((2 * square + static_cast<size_t>(r)) * sizeof(double)));
    num_bytes = used;
  }
};

}  // namespace

template <typename T>
size_t SubspaceBytes(int64_t m, int64_t n, int64_t r) {
  return Pieces<T>(nullptr, m, n, r).num_bytes;
}

template <typename T>
Status IterateSubspace(const CudaApi& cuda, DeviceProducts& products, const SmallKernels& kernels,
                       CudaStream stream, const SubspaceStep<T>& step) {
  const int64_t m = step.e.rows;
  const int64_t n = step.e.cols;
  const int64_t r = step.q.cols;
  if (step.q.rows != n || step.p.rows != m || step.p.cols != r || r > kMostRank) {
    return Status::InvalidArgument("a subspace iteration of matrices that do not fit");
  }
  if (r == 0) return Status::Ok();
  Pieces<T> work(step.workspace, m, n, r);
  DeviceMatrix<T> tall_p{work.tall.data, m, r};

  // Twice: once would leave what rounding makes of nearly dependent columns.
  DAD_RETURN_IF_ERROR(products.Multiply(step.e, false, In(step.q), false, step.p));
  DeviceMatrix<T> from = step.p;
  DeviceMatrix<T> to = tall_p;
  for (int pass = 0; pass < 2; ++pass) {
    DAD_RETURN_IF_ERROR(products.Multiply(In(from), true, In(from), false, work.gram));
    const OrthonormaliseArgs<T> args{static_cast<int>(r), kTolerance<T>, work.gram.data,
                                     work.scratch, work.factor.data};
    DAD_RETURN_IF_ERROR(Check(kernels.orthonormalise(&args, stream), "orthonormalise"));
    DAD_RETURN_IF_ERROR(products.Multiply(In(from), false, In(work.factor), false, to));
    std::swap(from, to);
  }
  DAD_RETURN_IF_ERROR(products.Multiply(step.e, true, In(step.p), false, step.q));
  if (step.singular_values == nullptr) return Status::Ok();

  // P has orthonormal columns, so the singular values of P Qᵀ are those of Q. With Qᵀ Q = V S² Vᵀ
  // both are turned by V.
  DAD_RETURN_IF_ERROR(products.Multiply(In(step.q), true, In(step.q), false, work.gram));
  const SmallSvdArgs<T> args{static_cast<int>(r), work.gram.data, work.scratch, work.factor.data,
                             step.singular_values};
  DAD_RETURN_IF_ERROR(Check(kernels.small_svd(&args, stream), "small_svd"));
  for (const DeviceMatrix<T>& turned : {step.p, step.q}) {
    // A product cannot be written over its input.
    const DeviceMatrix<T> result{work.tall.data, turned.rows, r};
    DAD_RETURN_IF_ERROR(products.Multiply(In(turned), false, In(work.factor), false, result));
    const auto num_bytes = static_cast<size_t>(turned.rows * r) * sizeof(T);
    DAD_RETURN_IF_ERROR(cuda.Check(
        cuda.MemcpyAsync(turned.data, result.data, num_bytes, kCudaMemcpyDefault, stream),
        "cudaMemcpyAsync"));
  }
  return Status::Ok();
}

#define DAD_INSTANTIATE(T)                                                                 \
  template size_t SubspaceBytes<T>(int64_t, int64_t, int64_t);                             \
  template Status IterateSubspace<T>(const CudaApi&, DeviceProducts&, const SmallKernels&, \
                                     CudaStream, const SubspaceStep<T>&);
DAD_INSTANTIATE(float)
DAD_INSTANTIATE(double)
#undef DAD_INSTANTIATE

}  // namespace dad
