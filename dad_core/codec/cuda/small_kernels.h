// Kernels over small matrices (small_matrix.h): one block, of which one thread computes and all
// copy. The tall products around them are cuBLAS's (device/subspace.h).
#pragma once

#include <cstdint>

#include "codec/cuda/kernels.h"
#include "codec/cuda/small_matrix.h"

namespace dad::cuda {

// From a Gram matrix of n columns to the factor that makes them orthonormal.
template <typename T>
struct OrthonormaliseKernel {
  struct Args {
    int n;
    double tolerance;
    const T* gram;    // n x n
    double* scratch;  // 2 n x n
    T* factor;        // n x n, upper triangular
  };
  struct Shared {};
  static constexpr int kPhases = 3;
  static int64_t Blocks(const Args& a) { return a.n > 0 ? 1 : 0; }

  static DAD_HD void Phase(int phase, Where at, Shared&, const Args& a) {
    const int size = a.n * a.n;
    if (phase == 0) {
      for (int i = at.thread; i < size; i += kThreads) a.scratch[i] = a.gram[i];
    } else if (phase == 1) {
      if (at.thread == 0) {
        OrthonormalisingFactor(a.n, a.tolerance, a.scratch, a.scratch + size);
      }
    } else {
      for (int i = at.thread; i < size; i += kThreads) {
        a.factor[i] = static_cast<T>(a.scratch[size + i]);
      }
    }
  }
};

// From a Gram matrix Yᵀ Y to Y's singular values, falling, and right singular vectors.
template <typename T>
struct SmallSvdKernel {
  struct Args {
    int n;
    const T* gram;
    double* scratch;  // 2 n x n + n
    T* v;             // n x n, a vector per column
    T* s;             // n
  };
  struct Shared {};
  static constexpr int kPhases = 3;
  static int64_t Blocks(const Args& a) { return a.n > 0 ? 1 : 0; }

  static DAD_HD void Phase(int phase, Where at, Shared&, const Args& a) {
    const int size = a.n * a.n;
    if (phase == 0) {
      for (int i = at.thread; i < size; i += kThreads) a.scratch[i] = a.gram[i];
    } else if (phase == 1) {
      if (at.thread == 0) {
        SmallSvd(a.n, a.scratch, a.scratch + size, a.scratch + 2 * size);
      }
    } else {
      for (int i = at.thread; i < size; i += kThreads) {
        a.v[i] = static_cast<T>(a.scratch[size + i]);
        if (i < a.n) a.s[i] = static_cast<T>(a.scratch[2 * size + i]);
      }
    }
  }
};

}  // namespace dad::cuda
