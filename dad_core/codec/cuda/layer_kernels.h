// Kernels over a layer's gradient as a matrix.
#pragma once

#include <cstdint>

#include "codec/cuda/kernel.h"

namespace dad::cuda {

// out[index[k]] += scale · x[k], row by row. Indices may repeat: a thread has a column and takes
// the rows in their order, so that the bits do not depend on when threads run.
template <typename T>
struct AddRowsKernel {
  struct Args {
    const T* x;             // rows × cols
    const uint32_t* index;  // checked
    int64_t rows;
    int64_t cols;
    T scale;
    T* out;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.cols, kThreads); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    const int64_t j = at.block * kThreads + at.thread;
    if (j >= a.cols) return;
    for (int64_t k = 0; k < a.rows; ++k) {
      a.out[a.index[k] * a.cols + j] += a.scale * a.x[k * a.cols + j];
    }
  }
};

// to = fromᵀ.
template <typename T>
struct TransposeKernel : ElementwiseKernel<TransposeKernel<T>> {
  struct Args {
    const T* from;  // rows × cols
    int64_t rows;
    int64_t cols;
    T* to;
  };
  static DAD_HD int64_t Count(const Args& a) { return a.rows * a.cols; }
  static DAD_HD void Element(int64_t i, const Args& a) {
    a.to[i] = a.from[i % a.rows * a.cols + i / a.rows];  // neighbours write neighbours
  }
};

}  // namespace dad::cuda
