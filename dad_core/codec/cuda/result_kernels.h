// Between the type of a tensor and the one that a method computes in: gradients of 16 bits on the
// way in, the sum of all ranks on the way out.
#pragma once

#include <cstdint>

#include "codec/cuda/kernels.h"

namespace dad::cuda {

template <typename From, typename To = float>
struct WidenKernel {
  struct Args {
    const From* from;
    int64_t count;
    To* to;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (i >= a.count) return;
      a.to[i] = Widen(a.from[i]);
    }
  }
};

// to = sum / divisor · factor, rounded to the type of the tensor; NaN if `nothing`: some rank's
// contribution was not finite.
template <typename T, typename To>
struct ResultKernel {
  struct Args {
    const T* sum;
    int64_t count;
    T divisor;
    T factor;
    bool nothing;
    To* to;  // may be sum
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (i >= a.count) return;
      const T value = a.nothing ? NotANumber<T>() : a.sum[i] / a.divisor * a.factor;
      Narrow(value, a.to + i);
    }
  }
};

}  // namespace dad::cuda
