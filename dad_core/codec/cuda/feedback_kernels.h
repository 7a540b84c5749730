// Element by element, what goes into a residual and what stays there: for int8, and wherever one
// array is added to another.
#pragma once

#include <cstdint>

#include "codec/cuda/kernel.h"

namespace dad::cuda {

// to = x · scale + kept, rounded twice as on the host.
template <typename T>
struct AddKeptKernel : ElementwiseKernel<AddKeptKernel<T>> {
  struct Args {
    const T* x;
    int64_t count;
    T scale;
    const T* kept;    // null: 0
    T* to;            // may be x or kept
    int* not_finite;  // null, or set if a sum is not
  };

  static DAD_HD void Element(int64_t i, const Args& a) {
    const T sum = a.x[i] * a.scale + (a.kept != nullptr ? a.kept[i] : T(0));
    if (a.not_finite != nullptr && !(sum - sum == T(0))) *a.not_finite = 1;
    a.to[i] = sum;
  }
};

// to = (scale · x)².
template <typename T>
struct SquareKernel : ElementwiseKernel<SquareKernel<T>> {
  struct Args {
    const T* x;
    int64_t count;
    T scale;
    T* to;
  };

  static DAD_HD void Element(int64_t i, const Args& a) {
    const T scaled = a.scale * a.x[i];
    a.to[i] = scaled * scaled;
  }
};

// left = all - sent.
template <typename T>
struct LeftKernel : ElementwiseKernel<LeftKernel<T>> {
  struct Args {
    const T* all;
    const T* sent;
    int64_t count;
    T* left;  // may be one of them
  };

  static DAD_HD void Element(int64_t i, const Args& a) { a.left[i] = a.all[i] - a.sent[i]; }
};

}  // namespace dad::cuda
