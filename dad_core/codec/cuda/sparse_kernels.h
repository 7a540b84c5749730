// The sparse methods: the pass over r and v, what it selects, and the words that are sent.
//
// What is selected keeps its order: each block puts its own together in its
// part of a scratch list, the sums of the blocks' counts are formed, and a last kernel moves the
// parts to where they belong.
#pragma once

#include <cstdint>

#include "codec/cuda/kernel.h"

namespace dad::cuda {

// A list that blocks of kTile elements write: Blocks · kTile long, with a count per block.
template <typename T>
struct Selection {
  uint32_t* index;
  T* r;
  T* v;  // null without a variance
};

template <typename T>
struct AccumulateKernel {
  struct Args {
    int64_t count;
    Rule<T> rule;
    const Threshold<T>* threshold;  // null, or in device memory: takes the place of rule.tau
    T scale;
    const T* g;
    const T* s;  // null: the square of c g
    const T* r;
    const T* v;  // null: no variance
    T* new_r;    // may be r
    T* new_v;
    uint32_t first;  // index of the first element
    Selection<T> scratch;
    int32_t* block_count;
    int* not_finite;  // set if an r' is not finite
  };
  struct Shared {
    int32_t sum[2][kThreads];
    T r[kTile];
    T v[kTile];
    uint8_t mask[kThreads];
  };
  static constexpr int kPhases = kScanSteps + 2;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const int64_t begin = at.block * kTile + int64_t{at.thread} * kPerThread;
    if (phase == 0) {
      unsigned mask = 0;
      int32_t count = 0;
      Rule<T> rule = a.rule;
      if (a.threshold != nullptr) rule.tau = a.threshold->least;
      for (int k = 0; k < kPerThread && begin + k < a.count; ++k) {
        const int64_t i = begin + k;
        const Accumulated<T> sum =
            AccumulateElement(rule, a.g[i], a.scale, a.s != nullptr ? a.s + i : nullptr, a.r[i],
                              a.v != nullptr ? a.v + i : nullptr);
        if (!sum.finite) *a.not_finite = 1;
        a.new_r[i] = sum.selected ? T(0) : sum.r;
        if (a.v != nullptr) a.new_v[i] = sum.selected ? T(0) : sum.v * rule.zeta;
        if (!sum.selected) continue;
        mask |= 1u << k;
        ++count;
        shared.r[at.thread * kPerThread + k] = sum.r;
        shared.v[at.thread * kPerThread + k] = sum.v;
      }
      shared.mask[at.thread] = static_cast<uint8_t>(mask);
      shared.sum[0][at.thread] = count;
    } else if (phase <= kScanSteps) {
      ScanStep(shared.sum, phase - 1, at.thread);
    } else {
      const int32_t* sum = shared.sum[kScanSteps % 2];
      int64_t to = at.block * kTile + (at.thread > 0 ? sum[at.thread - 1] : 0);
      for (int k = 0; k < kPerThread; ++k) {
        if ((shared.mask[at.thread] >> k & 1) == 0) continue;
        a.scratch.index[to] = a.first + static_cast<uint32_t>(begin + k);
        a.scratch.r[to] = shared.r[at.thread * kPerThread + k];
        if (a.v != nullptr) a.scratch.v[to] = shared.v[at.thread * kPerThread + k];
        ++to;
      }
      if (at.thread == kThreads - 1) a.block_count[at.block] = sum[at.thread];
    }
  }
};

// Where each block's part begins, and the count of all. One block.
struct OffsetsKernel {
  struct Args {
    const int32_t* block_count;
    int64_t num_blocks;
    int64_t* offset;
    int64_t* total;
  };
  struct Shared {
    int64_t sum[2][kThreads];
  };
  static constexpr int kPhases = kScanSteps + 2;
  static int64_t Blocks(const Args&) { return 1; }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const int64_t each = DivideUp(a.num_blocks, kThreads);
    const int64_t begin = at.thread * each < a.num_blocks ? at.thread * each : a.num_blocks;
    const int64_t end = begin + each < a.num_blocks ? begin + each : a.num_blocks;
    if (phase == 0) {
      int64_t sum = 0;
      for (int64_t b = begin; b < end; ++b) sum += a.block_count[b];
      shared.sum[0][at.thread] = sum;
    } else if (phase <= kScanSteps) {
      ScanStep(shared.sum, phase - 1, at.thread);
    } else {
      const int64_t* sum = shared.sum[kScanSteps % 2];
      int64_t offset = at.thread > 0 ? sum[at.thread - 1] : 0;
      for (int64_t b = begin; b < end; ++b) {
        a.offset[b] = offset;
        offset += a.block_count[b];
      }
      if (at.thread == kThreads - 1) *a.total = sum[at.thread];
    }
  }
};

// Moves the blocks' parts together: of a selection, or of words.
template <typename T>
struct GatherKernel {
  struct Args {
    const int32_t* block_count;
    const int64_t* offset;
    int64_t num_blocks;
    Selection<T> from;
    Selection<T> to;  // long enough for all
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return a.num_blocks; }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    const int64_t from = at.block * kTile;
    const int64_t to = a.offset[at.block];
    for (int64_t k = at.thread; k < a.block_count[at.block]; k += kThreads) {
      a.to.index[to + k] = a.from.index[from + k];
      if (a.from.r != nullptr) a.to.r[to + k] = a.from.r[from + k];
      if (a.from.v != nullptr) a.to.v[to + k] = a.from.v[from + k];
    }
  }
};

// The largest magnitude of what was selected, as bits; *top is 0 before.
template <typename T>
struct TopKernel {
  struct Args {
    const T* r;
    const int64_t* count;
    int64_t capacity;
    Word<T>* top;
  };
  struct Shared {
    Word<T> largest[kThreads];
  };
  static constexpr int kPhases = kScanSteps + 2;
  static int64_t Blocks(const Args& a) { return DivideUp(a.capacity, kTile); }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    if (phase == 0) {
      Word<T> largest = 0;
      for (int k = 0; k < kPerThread; ++k) {
        const int64_t i = at.block * kTile + int64_t{k} * kThreads + at.thread;
        if (i >= *a.count) break;
        const Word<T> magnitude = MagnitudeBits(a.r[i]);
        if (magnitude > largest) largest = magnitude;
      }
      shared.largest[at.thread] = largest;
    } else if (phase <= kScanSteps) {
      ReduceMaxStep(shared.largest, phase - 1, at.thread);
    } else if (at.thread == 0 && shared.largest[0] != 0) {
      AtomicMax(a.top, shared.largest[0]);
    }
  }
};

template <typename T>
DAD_HD int TopExponent(Word<T> top) {
  return top == 0 ? 0 : ExponentOf(BitsAs<T>(top)).floor;
}

// Codes what was selected into words, with r and v as AccumulateKernel has left them: what is too
// small goes back there, and with `feedback` what rounding leaves of r.
template <typename T>
struct EncodeVgcKernel {
  struct Args {
    Selection<T> selected;
    const int64_t* count;
    int64_t capacity;
    const Word<T>* top;
    T zeta;
    bool feedback;
    uint32_t first;  // index of r[0] and v[0]
    T* r;
    T* v;
    uint32_t* scratch;  // words, Blocks · kTile
    int32_t* block_count;
  };
  struct Shared {
    int32_t sum[2][kThreads];
    int8_t code[kTile];
  };
  static constexpr int kPhases = kScanSteps + 2;
  static int64_t Blocks(const Args& a) { return DivideUp(a.capacity, kTile); }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const int64_t begin = at.block * kTile + int64_t{at.thread} * kPerThread;
    if (phase == 0) {
      const int e_max = TopExponent<T>(*a.top);
      int32_t count = 0;
      for (int k = 0; k < kPerThread; ++k) {
        int8_t& code = shared.code[at.thread * kPerThread + k];
        code = -1;
        if (begin + k >= *a.count) continue;
        const T r = a.selected.r[begin + k];
        const uint32_t i = a.selected.index[begin + k] - a.first;
        code = static_cast<int8_t>(VgcCode(e_max, r));
        if (code < 0) {
          a.r[i] = r;
          a.v[i] = a.selected.v[begin + k] * a.zeta;
        } else {
          ++count;
          if (a.feedback) a.r[i] = r - VgcValue<T>(e_max, code);
        }
      }
      shared.sum[0][at.thread] = count;
    } else if (phase <= kScanSteps) {
      ScanStep(shared.sum, phase - 1, at.thread);
    } else {
      const int32_t* sum = shared.sum[kScanSteps % 2];
      int64_t to = at.block * kTile + (at.thread > 0 ? sum[at.thread - 1] : 0);
      for (int k = 0; k < kPerThread; ++k) {
        const int code = shared.code[at.thread * kPerThread + k];
        if (code >= 0) a.scratch[to++] = WordOf(a.selected.index[begin + k], code, 4);
      }
      if (at.thread == kThreads - 1) a.block_count[at.block] = sum[at.thread];
    }
  }
};

// Codes of a threshold's multiples into words: all that was selected is sent.
template <typename T>
struct EncodeStromKernel : ElementwiseKernel<EncodeStromKernel<T>> {
  struct Args {
    Selection<T> selected;
    const int64_t* count;
    int64_t capacity;
    const Threshold<T>* threshold;
    bool multiples;
    uint32_t first;
    T* r;
    T* v;  // null without a variance
    uint32_t* words;
  };
  static DAD_HD int64_t Count(const Args& a) { return a.capacity; }
  static DAD_HD void Element(int64_t j, const Args& a) {
    if (j >= *a.count) return;
    const uint32_t i = a.selected.index[j] - a.first;
    const T* v = a.v != nullptr ? a.selected.v + j : nullptr;
    const StromSent<T> sent = StromElement(a.threshold->tau, a.multiples, a.selected.r[j], v);
    a.r[i] = sent.r;
    if (a.v != nullptr) a.v[i] = sent.v;
    a.words[j] = WordOf(a.selected.index[j], sent.code, a.multiples ? 4 : 1);
  }
};

// out[index] += value of the code: of one share, which the host has checked; those of several ranks
// one after the other.
template <typename T>
struct AddWordsKernel : ElementwiseKernel<AddWordsKernel<T>> {
  struct Args {
    const uint32_t* words;
    int64_t count;
    int value_bits;
    T values[16];
    T* out;
  };

  static DAD_HD void Element(int64_t j, const Args& a) {
    const uint32_t word = a.words[j];
    a.out[IndexOf(word, a.value_bits)] += a.values[CodeOf(word, a.value_bits)];
  }
};

}  // namespace dad::cuda
