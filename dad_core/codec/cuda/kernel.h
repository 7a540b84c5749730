// What a kernel is: a struct with its arguments, its shared memory, and phases; between two phases
// all threads of a block meet. launch.cu runs them on a device; tests/cpp/gpu/emulate.h runs the
// same code in loops on the host. Kernels of common shapes derive from a template below.
//
// No kernel needs an answer on the host before the next can be put on the stream: counts and
// flags stay in device memory. C++17, no headers of the core.
#pragma once

#include <cstdint>

#include "codec/cuda/elements.h"

namespace dad::cuda {

struct Where {
  int64_t block;
  int thread;
};

constexpr int kThreads = 256;
constexpr int kPerThread = 4;
constexpr int64_t kTile = int64_t{kThreads} * kPerThread;
constexpr int kScanSteps = 8;  // 2^8 threads

// Most kernels say how many phases they have as kPhases, and each is compiled by itself. Where
// loops have to meet their number depends on the arguments: Phases(args).
template <typename Kernel, typename = void>
struct HasFixedPhases {
  static constexpr bool kValue = false;
};
template <typename Kernel>
struct HasFixedPhases<Kernel, decltype(static_cast<void>(Kernel::kPhases))> {
  static constexpr bool kValue = true;
};

DAD_HD int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Several blocks may call it for one address; the result does not depend on their order.
template <typename W>
DAD_HD void AtomicMax(W* at, W value) {
#if defined(__CUDA_ARCH__)
  atomicMax(at, value);
#else
  if (value > *at) *at = value;
#endif
}

// The largest of kThreads values, in kScanSteps phases, at value[0].
template <typename W>
DAD_HD void ReduceMaxStep(W* value, int step, int thread) {
  const int half = kThreads >> (step + 1);
  if (thread < half && value[thread + half] > value[thread]) value[thread] = value[thread + half];
}

// Inclusive sums of kThreads values, in kScanSteps phases, from sum[0] to sum[kScanSteps % 2].
template <typename W>
DAD_HD void ScanStep(W (*sum)[kThreads], int step, int thread) {
  const int reach = 1 << step;
  const W* from = sum[step % 2];
  sum[(step + 1) % 2][thread] = from[thread] + (thread >= reach ? from[thread - reach] : W{0});
}

// A kernel whose threads each compute elements by themselves. `Kernel` has Args with a `count`, or
// hides Count, and Element(i, args).
template <typename Kernel>
struct ElementwiseKernel {
  struct Shared {};
  static constexpr int kPhases = 1;

  template <typename Args>
  static DAD_HD int64_t Count(const Args& a) {
    return a.count;
  }
  template <typename Args>
  static int64_t Blocks(const Args& a) {
    return DivideUp(Kernel::Count(a), kTile);
  }
  template <typename Args>
  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i =
          at.block * kTile + int64_t{k} * kThreads + at.thread;  // neighbours together
      if (i >= Kernel::Count(a)) return;
      Kernel::Element(i, a);
    }
  }
};

// A kernel whose blocks each scale a run of values by the largest magnitude in it. `Kernel` has
// Blocks, Size(block, args), Value(block, i, args), and Write(at, largest, args), which all threads
// call once the largest is known; T is the type of the values.
template <typename Kernel, typename T>
struct ScaledKernel {
  struct Shared {
    Word<T> largest[kThreads];
  };
  static constexpr int kPhases = kScanSteps + 2;

  template <typename Args>
  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    if (phase == 0) {
      Word<T> largest = 0;
      for (int64_t i = at.thread; i < Kernel::Size(at.block, a); i += kThreads) {
        const Word<T> magnitude = MagnitudeBits(Kernel::Value(at.block, i, a));
        if (magnitude > largest) largest = magnitude;
      }
      shared.largest[at.thread] = largest;
    } else if (phase <= kScanSteps) {
      ReduceMaxStep(shared.largest, phase - 1, at.thread);
    } else {
      Kernel::Write(at, shared.largest[0], a);
    }
  }
};

}  // namespace dad::cuda
