// The threshold of Strom's method, relative to the gradient (exchange/method/sparse/sparse.h): the
// bits of codec/strom.h's RootMeanSquare, whose order of additions they keep. A block does 2^16
// elements: all threads load and square, eight of them add, each in its lane.
#pragma once

#include <cmath>
#include <cstdint>

#include "codec/cuda/kernel.h"

namespace dad::cuda {

constexpr int64_t kSumOver = 1 << 16;
constexpr int kLanes = 8;

template <typename T>
struct SumSquaresKernel {
  static constexpr int64_t kPart = 4096;  // elements that lie in shared memory at a time
  struct Args {
    const T* x;
    int64_t count;
    T scale;
    double* sums;  // one per block
  };
  struct Shared {
    double square[kPart];
    double lane[kLanes];
  };
  // Loading and adding in turn, then the sum of the lanes.
  static constexpr int kPhases = 2 * static_cast<int>(kSumOver / kPart) + 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kSumOver); }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const int64_t begin = at.block * kSumOver + phase / 2 * kPart;
    const int64_t left = a.count - begin;
    const int64_t part = left < kPart ? left : kPart;
    if (phase == kPhases - 1) {
      if (at.thread != 0) return;
      double sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += shared.lane[lane];
      a.sums[at.block] = sum;
    } else if (phase % 2 == 0) {
      if (phase == 0 && at.thread < kLanes) shared.lane[at.thread] = 0;
      for (int64_t i = at.thread; i < part; i += kThreads) {
        const auto x = static_cast<double>(a.x[begin + i] * a.scale);
        shared.square[i] = x * x;
      }
    } else if (at.thread < kLanes) {
      double sum = shared.lane[at.thread];
      for (int64_t i = at.thread; i < part; i += kLanes) sum += shared.square[i];
      shared.lane[at.thread] = sum;
    }
  }
};

// From the sums to the running mean and to τ. One thread.
template <typename T>
struct TauKernel {
  struct Args {
    const double* sums;
    int64_t num_sums;
    int64_t count;
    bool absolute;            // tau is τ; nothing of the sums and the mean is looked at
    double tau;               // else this many times the mean
    const double* mean;       // before this step; 0: there is none
    double* new_mean;         // may be mean
    Threshold<T>* threshold;  // what AccumulateKernel and EncodeStromKernel go by
    int* not_finite;          // set if the gradient is not
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args&) { return 1; }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    if (at.thread != 0) return;
    if (a.absolute) {
      *a.threshold = ThresholdOf<T>(static_cast<float>(a.tau));
      return;
    }
    double total = 0;
    for (int64_t b = 0; b < a.num_sums; ++b) total += a.sums[b];
    const double rms = a.count == 0 ? 0.0 : sqrt(total / static_cast<double>(a.count));
    if (!(rms <= Limits<double>::kLargest)) *a.not_finite = 1;
    const double mean = *a.mean == 0 ? rms : 0.9 * *a.mean + 0.1 * rms;
    *a.new_mean = mean;
    const double most = Limits<float>::kLargest;
    const double tau = a.tau * mean;
    *a.threshold = ThresholdOf<T>(static_cast<float>(tau < most ? tau : most));
  }
};

}  // namespace dad::cuda
