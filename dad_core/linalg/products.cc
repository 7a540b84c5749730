#include "linalg/products.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "linalg/kernels.h"
#include "linalg/outer.h"

namespace dad {
namespace {

using linalg::Kernels;
using linalg::KernelsAt;
using linalg::kSkinny;
using linalg::PackedOuter;

// Up to this depth our own kernel is faster than Eigen's, which cuts along the depth and
// reads and writes c on the way (docs/numerics.md).
constexpr int64_t kOwnDepth = 256;

template <typename T>
void Scale(T beta, MatrixView<T> c) {
  for (int64_t i = 0; i < c.rows; ++i) {
    T* row = c.row(i);
    if (beta == T{0}) {
      std::fill_n(row, c.cols, T{0});
    } else if (beta != T{1}) {
      for (int64_t j = 0; j < c.cols; ++j) row[j] *= beta;
    }
  }
}

template <typename T>
std::vector<T> Transposed(MatrixView<const T> x) {
  std::vector<T> out(static_cast<size_t>(x.rows * x.cols));
  Transpose<T>(x, ViewOf(out.data(), x.cols, x.rows));
  return out;
}

}  // namespace

template <typename T>
void AddOuter(CpuLevel level, std::type_identity_t<T> alpha, ConstMatrix<T> d, ConstMatrix<T> a,
              std::type_identity_t<T> beta, MatrixView<T> c) {
  if (c.empty()) return;
  const Kernels<T>& kernels = KernelsAt<T>(level);
  if (d.rows > kOwnDepth && c.rows > kSkinny && c.cols > kSkinny) {
    Scale(T{beta}, c);
    kernels.gemm_tn(alpha, d.data, d.stride, a.data, a.stride, c.data, c.stride, c.rows, c.cols,
                    d.rows);
    return;
  }
  const PackedOuter<T> sum(kernels, {{d, a, alpha, 0}}, c.rows, c.cols);
  const int64_t block = linalg::BlockRows(kernels, c.cols);
  for (int64_t i = 0; i < c.rows; i += block) {
    sum.AddTo(i, beta, c.Rows(i, std::min(block, c.rows - i)));
  }
}

template <typename T>
void Multiply(CpuLevel level, ConstMatrix<T> a, ConstMatrix<T> b, MatrixView<T> c) {
  if (c.empty()) return;
  const Kernels<T>& kernels = KernelsAt<T>(level);
  if (c.cols <= kSkinny) {
    const std::vector<T> bt = Transposed<T>(b);
    kernels.dots(a.data, a.rows, a.cols, a.stride, bt.data(), b.cols, b.rows, c.data, c.stride, 1);
  } else if (c.rows <= kSkinny) {
    kernels.combine(b.data, b.rows, b.cols, b.stride, a.data, a.rows, 1, a.stride, c.data, c.stride,
                    false);
  } else {
    Scale(T{0}, c);
    kernels.gemm_nn(1, a.data, a.stride, b.data, b.stride, c.data, c.stride, c.rows, c.cols,
                    a.cols);
  }
}

template <typename T>
void MultiplyTransposed(CpuLevel level, ConstMatrix<T> a, ConstMatrix<T> b, MatrixView<T> c) {
  if (c.empty()) return;
  const Kernels<T>& kernels = KernelsAt<T>(level);
  if (c.cols <= kSkinny) {
    kernels.dots(a.data, a.rows, a.cols, a.stride, b.data, b.rows, b.stride, c.data, c.stride, 1);
  } else if (c.rows <= kSkinny) {
    kernels.dots(b.data, b.rows, b.cols, b.stride, a.data, a.rows, a.stride, c.data, 1, c.stride);
  } else {
    Scale(T{0}, c);
    kernels.gemm_nt(1, a.data, a.stride, b.data, b.stride, c.data, c.stride, c.rows, c.cols,
                    a.cols);
  }
}

template <typename T>
void ExpandFactors(CpuLevel level, std::type_identity_t<T> alpha, ConstMatrix<T> ut,
                   ConstMatrix<T> vt, std::type_identity_t<T> beta, MatrixView<T> c,
                   std::type_identity_t<T>* c_bias) {
  AddOuter(level, alpha, ut, vt.Cols(0, c.cols), beta, c);
  if (c_bias == nullptr) return;
  const Kernels<T>& kernels = KernelsAt<T>(level);
  Scale(T{beta}, ViewOf(c_bias, 1, c.rows));
  for (int64_t k = 0; k < ut.rows; ++k) {
    kernels.axpy(alpha * vt.row(k)[c.cols], ut.row(k), c_bias, c.rows);
  }
}

template <typename T>
void ColumnSums(CpuLevel level, std::type_identity_t<T> alpha, ConstMatrix<T> d,
                std::type_identity_t<T> beta, T* out) {
  const Kernels<T>& kernels = KernelsAt<T>(level);
  std::vector<T> sums(static_cast<size_t>(d.cols), T{0});
  for (int64_t k = 0; k < d.rows; ++k) kernels.axpy(T{1}, d.row(k), sums.data(), d.cols);
  Scale(T{beta}, ViewOf(out, 1, d.cols));
  kernels.axpy(alpha, sums.data(), out, d.cols);
}

template <typename T>
void Transpose(ConstMatrix<T> x, MatrixView<T> c) {
  // In squares that both sides keep in cache: whole rows would touch a line per element.
  constexpr int64_t kSide = 32;
  for (int64_t i0 = 0; i0 < x.rows; i0 += kSide) {
    const int64_t i1 = std::min(i0 + kSide, x.rows);
    for (int64_t j0 = 0; j0 < x.cols; j0 += kSide) {
      const int64_t j1 = std::min(j0 + kSide, x.cols);
      for (int64_t j = j0; j < j1; ++j) {
        T* out = c.row(j);
        for (int64_t i = i0; i < i1; ++i) out[i] = x.row(i)[j];
      }
    }
  }
}

template <typename T>
bool AllFinite(MatrixView<T> x) {
  for (int64_t i = 0; i < x.rows; ++i) {
    // x - x is 0, or NaN if x is not finite; a sum of those has no branch.
    const T* row = x.row(i);
    std::remove_const_t<T> sum[8] = {};
    for (int64_t j = 0; j < x.cols; ++j) sum[j % 8] += row[j] - row[j];
    for (const T s : sum) {
      if (s != 0) return false;
    }
  }
  return true;
}

#define DAD_INSTANTIATE(T)                                                                      \
  template void AddOuter<T>(CpuLevel, T, ConstMatrix<T>, ConstMatrix<T>, T, MatrixView<T>);     \
  template void Multiply<T>(CpuLevel, ConstMatrix<T>, ConstMatrix<T>, MatrixView<T>);           \
  template void MultiplyTransposed<T>(CpuLevel, ConstMatrix<T>, ConstMatrix<T>, MatrixView<T>); \
  template void ExpandFactors<T>(CpuLevel, T, ConstMatrix<T>, ConstMatrix<T>, T, MatrixView<T>, \
                                 T*);                                                           \
  template void ColumnSums<T>(CpuLevel, T, ConstMatrix<T>, T, T*);                              \
  template void Transpose<T>(ConstMatrix<T>, MatrixView<T>);                                    \
  template bool AllFinite<T>(MatrixView<T>);                                                    \
  template bool AllFinite<const T>(MatrixView<const T>)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
