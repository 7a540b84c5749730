// Between the type of a tensor and the one that a method computes in: gradients of 16 bits on the
// way in, the sum of all ranks on the way out.
#pragma once

#include <cstdint>

#include "codec/cuda/kernel.h"

namespace dad::cuda {

template <typename From, typename To = float>
struct WidenKernel : ElementwiseKernel<WidenKernel<From, To>> {
  struct Args {
    const From* from;
    int64_t count;
    To* to;
  };

  static DAD_HD void Element(int64_t i, const Args& a) { a.to[i] = Widen(a.from[i]); }
};

// to = sum / divisor · factor, rounded to the type of the tensor; NaN if `nothing`: some rank's
// contribution was not finite.
template <typename T, typename To>
struct ResultKernel : ElementwiseKernel<ResultKernel<T, To>> {
  struct Args {
    const T* sum;
    int64_t count;
    T divisor;
    T factor;
    bool nothing;
    To* to;  // may be sum
  };

  static DAD_HD void Element(int64_t i, const Args& a) {
    const T value = a.nothing ? NotANumber<T>() : a.sum[i] / a.divisor * a.factor;
    Narrow(value, a.to + i);
  }
};

}  // namespace dad::cuda
