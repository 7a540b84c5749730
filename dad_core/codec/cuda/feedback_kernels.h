// Element by element, what goes into a residual and what stays there: for int8, and wherever one
// array is added to another.
#pragma once

#include <cstdint>

#include "codec/cuda/kernels.h"

namespace dad::cuda {

// to = x · scale + kept, rounded twice as on the host.
template <typename T>
struct AddKeptKernel {
  struct Args {
    const T* x;
    int64_t count;
    T scale;
    const T* kept;    // null: 0
    T* to;            // may be x or kept
    int* not_finite;  // null, or set if a sum is not
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (i >= a.count) return;
      const T sum = a.x[i] * a.scale + (a.kept != nullptr ? a.kept[i] : T(0));
      if (a.not_finite != nullptr && !(sum - sum == T(0))) *a.not_finite = 1;
      a.to[i] = sum;
    }
  }
};

// to = (scale · x)².
template <typename T>
struct SquareKernel {
  struct Args {
    const T* x;
    int64_t count;
    T scale;
    T* to;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (i >= a.count) return;
      const T scaled = a.scale * a.x[i];
      a.to[i] = scaled * scaled;
    }
  }
};

// left = all - sent.
template <typename T>
struct LeftKernel {
  struct Args {
    const T* all;
    const T* sent;
    int64_t count;
    T* left;  // may be one of them
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (i >= a.count) return;
      a.left[i] = a.all[i] - a.sent[i];
    }
  }
};

}  // namespace dad::cuda
