// The kernels' bodies. A kernel is a struct: its arguments, its shared memory, and phases; between
// two phases all threads of a block meet. launch.cu runs them on a device; tests/cpp/gpu/emulate.h
// runs the same code in loops on the host.
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

// ---- Fused buffers: pieces are copied together or apart, cast, and scaled.

struct CopySegment {
  const void* from;
  void* to;
  int64_t count;
  int64_t first_block;  // Σ blocks of the segments before; one block does kTile elements
};

template <typename From, typename To>
struct CopyKernel {
  struct Args {
    const CopySegment* segments;  // device memory
    int num_segments;
    int64_t blocks;
    double scale;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return a.blocks; }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    int low = 0;  // the last segment that begins at or before this block; empty ones have none
    int high = a.num_segments;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (a.segments[middle].first_block <= at.block ? low : high) = middle;
    }
    const CopySegment& segment = a.segments[low];
    const int64_t begin = (at.block - segment.first_block) * kTile + at.thread;
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i = begin + int64_t{k} * kThreads;  // neighbours read neighbours
      if (i >= segment.count) return;
      auto x = Widen(static_cast<const From*>(segment.from)[i]);
      x *= static_cast<decltype(x)>(a.scale);
      Narrow(x, static_cast<To*>(segment.to) + i);
    }
  }
};

// ---- int8 in buckets (codec/int_quantise.h): a block per bucket.

template <typename T>
struct QuantiseInt8Kernel {
  struct Args {
    const T* x;
    int64_t count;
    int64_t bucket;
    uint8_t* out;  // scales, then bytes; aligned for a float
    T* decoded;    // null, or what receivers will have; may be x
  };
  struct Shared {
    Word<T> largest[kThreads];
  };
  static constexpr int kPhases = kScanSteps + 2;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, a.bucket); }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const int64_t begin = at.block * a.bucket;
    const int64_t end = begin + a.bucket < a.count ? begin + a.bucket : a.count;
    if (phase == 0) {
      Word<T> largest = 0;
      for (int64_t i = begin + at.thread; i < end; i += kThreads) {
        const Word<T> magnitude = MagnitudeBits(a.x[i]);
        if (magnitude > largest) largest = magnitude;
      }
      shared.largest[at.thread] = largest;
    } else if (phase <= kScanSteps) {
      ReduceMaxStep(shared.largest, phase - 1, at.thread);
    } else {
      const float scale = ScaleOf<T>(shared.largest[0], 127);
      const T inverse = scale > 0 ? T(1) / static_cast<T>(scale) : T(0);
      auto* scales = reinterpret_cast<float*>(a.out);
      auto* ints = reinterpret_cast<int8_t*>(a.out) + DivideUp(a.count, a.bucket) * 4;
      if (at.thread == 0) scales[at.block] = scale;
      for (int64_t i = begin + at.thread; i < end; i += kThreads) {
        const int q = scale > 0 ? ToInt(a.x[i], inverse, 127) : 0;
        ints[i] = static_cast<int8_t>(q);
        if (a.decoded != nullptr) a.decoded[i] = static_cast<T>(scale) * static_cast<T>(q);
      }
    }
  }
};

// Sets *bad where a scale or an element is out of range. Before the kernel that adds: that one
// then does nothing, and x is unchanged.
struct CheckInt8Kernel {
  struct Args {
    const uint8_t* in;
    int64_t count;
    int64_t bucket;
    int* bad;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    const auto* scales = reinterpret_cast<const float*>(a.in);
    const auto* ints = reinterpret_cast<const int8_t*>(a.in) + DivideUp(a.count, a.bucket) * 4;
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (i >= a.count) return;
      if (ints[i] == -128 || !IsScale(scales[i / a.bucket])) *a.bad = 1;
    }
  }
};

template <typename T>
struct DequantiseInt8Kernel {
  struct Args {
    const uint8_t* in;
    int64_t count;
    int64_t bucket;
    bool add;
    const int* bad;  // null: they have been checked
    T* x;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    if (a.bad != nullptr && *a.bad != 0) return;
    const auto* scales = reinterpret_cast<const float*>(a.in);
    const auto* ints = reinterpret_cast<const int8_t*>(a.in) + DivideUp(a.count, a.bucket) * 4;
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (i >= a.count) return;
      const T value = static_cast<T>(scales[i / a.bucket]) * static_cast<T>(ints[i]);
      a.x[i] = a.add ? a.x[i] + value : value;
    }
  }
};

// ---- int4, a scale per row (codec/factor_wire.h): a block per row.

DAD_HD int64_t Int4RowBytes(int64_t cols) { return 4 + (cols + 1) / 2; }

template <typename T>
struct QuantiseInt4Kernel {
  struct Args {
    const T* x;
    int64_t rows;
    int64_t cols;
    int64_t stride;  // elements from row to row
    uint8_t* out;    // rows of Int4RowBytes, of any alignment
    T* decoded;      // null, or with the same stride; may be x
  };
  struct Shared {
    Word<T> largest[kThreads];
  };
  static constexpr int kPhases = kScanSteps + 2;
  static int64_t Blocks(const Args& a) { return a.rows; }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const T* x = a.x + at.block * a.stride;
    if (phase == 0) {
      Word<T> largest = 0;
      for (int64_t j = at.thread; j < a.cols; j += kThreads) {
        const Word<T> magnitude = MagnitudeBits(x[j]);
        if (magnitude > largest) largest = magnitude;
      }
      shared.largest[at.thread] = largest;
    } else if (phase <= kScanSteps) {
      ReduceMaxStep(shared.largest, phase - 1, at.thread);
    } else {
      const float scale = ScaleOf<T>(shared.largest[0], 7);
      const T inverse = scale > 0 ? T(1) / static_cast<T>(scale) : T(0);
      uint8_t* out = a.out + at.block * Int4RowBytes(a.cols);
      if (at.thread < 4) {
        out[at.thread] = static_cast<uint8_t>(BitsAs<uint32_t>(scale) >> (8 * at.thread));
      }
      for (int64_t j = 2 * int64_t{at.thread}; j < a.cols; j += 2 * kThreads) {
        const bool second = j + 1 < a.cols;
        const int low = scale > 0 ? ToInt(x[j], inverse, 7) : 0;
        const int high = second && scale > 0 ? ToInt(x[j + 1], inverse, 7) : 0;
        out[4 + j / 2] = PackNibbles(low, high);
        if (a.decoded != nullptr) {
          T* decoded = a.decoded + at.block * a.stride;
          decoded[j] = static_cast<T>(scale) * static_cast<T>(low);
          if (second) decoded[j + 1] = static_cast<T>(scale) * static_cast<T>(high);
        }
      }
    }
  }
};

// int8, a scale per row (codec/factor_wire.h): a block per row.
struct QuantiseInt8RowsKernel {
  struct Args {
    const float* x;
    int64_t rows;
    int64_t cols;
    uint8_t* out;    // rows of 4 + cols bytes, of any alignment
    float* decoded;  // may be x
  };
  struct Shared {
    Word<float> largest[kThreads];
  };
  static constexpr int kPhases = kScanSteps + 2;
  static int64_t Blocks(const Args& a) { return a.rows; }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const float* x = a.x + at.block * a.cols;
    if (phase == 0) {
      Word<float> largest = 0;
      for (int64_t j = at.thread; j < a.cols; j += kThreads) {
        const Word<float> magnitude = MagnitudeBits(x[j]);
        if (magnitude > largest) largest = magnitude;
      }
      shared.largest[at.thread] = largest;
    } else if (phase <= kScanSteps) {
      ReduceMaxStep(shared.largest, phase - 1, at.thread);
    } else {
      const float scale = ScaleOf<float>(shared.largest[0], 127);
      const float inverse = scale > 0 ? 1 / scale : 0;
      uint8_t* out = a.out + at.block * (4 + a.cols);
      if (at.thread < 4) {
        out[at.thread] = static_cast<uint8_t>(BitsAs<uint32_t>(scale) >> (8 * at.thread));
      }
      for (int64_t j = at.thread; j < a.cols; j += kThreads) {
        const int q = scale > 0 ? ToInt(x[j], inverse, 127) : 0;
        out[4 + j] = static_cast<uint8_t>(q);
        a.decoded[at.block * a.cols + j] = scale * static_cast<float>(q);
      }
    }
  }
};

// bf16 as factors travel in it, and what receivers will have.
struct RoundBf16Kernel {
  struct Args {
    const float* x;
    int64_t count;
    BFloat16* out;
    float* decoded;  // may be x
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (i >= a.count) return;
      const BFloat16 rounded = ToBFloat16(a.x[i]);
      a.out[i] = rounded;
      a.decoded[i] = ToFloat(rounded);
    }
  }
};

// Sets *bad where a scale, an element or the unused half of a last byte is out of range.
template <typename T>
struct DequantiseInt4Kernel {
  struct Args {
    const uint8_t* in;
    int64_t rows;
    int64_t cols;
    int64_t stride;
    int* bad;
    T* x;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return a.rows; }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    const uint8_t* in = a.in + at.block * Int4RowBytes(a.cols);
    T* x = a.x + at.block * a.stride;
    uint32_t bits = 0;
    for (int byte = 0; byte < 4; ++byte) bits |= static_cast<uint32_t>(in[byte]) << (8 * byte);
    const auto scale = BitsAs<float>(bits);
    if (at.thread == 0 && !IsScale(scale)) *a.bad = 1;
    for (int64_t j = 2 * int64_t{at.thread}; j < a.cols; j += 2 * kThreads) {
      const uint8_t both = in[4 + j / 2];
      const bool second = j + 1 < a.cols;
      const int low = LowNibble(both);
      const int high = HighNibble(both);
      if (low == -8 || high == -8 || (!second && high != 0)) *a.bad = 1;
      x[j] = static_cast<T>(scale) * static_cast<T>(low);
      if (second) x[j + 1] = static_cast<T>(scale) * static_cast<T>(high);
    }
  }
};

// ---- Sparse methods. What is selected keeps its order: each block puts its own together in its
// part of a scratch list, the sums of the blocks' counts are formed, and a last kernel moves the
// parts to where they belong.

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
struct EncodeStromKernel {
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
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.capacity, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t j = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (j >= *a.count) return;
      const uint32_t i = a.selected.index[j] - a.first;
      const T* v = a.v != nullptr ? a.selected.v + j : nullptr;
      const StromSent<T> sent = StromElement(a.threshold->tau, a.multiples, a.selected.r[j], v);
      a.r[i] = sent.r;
      if (a.v != nullptr) a.v[i] = sent.v;
      a.words[j] = WordOf(a.selected.index[j], sent.code, a.multiples ? 4 : 1);
    }
  }
};

// Sets *bad where an index does not rise or is beyond the tensor. Before AddWordsKernel, which then
// does nothing.
struct CheckWordsKernel {
  struct Args {
    const uint32_t* words;
    int64_t count;
    int value_bits;
    int64_t extent;
    int* bad;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t j = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (j >= a.count) return;
      const uint32_t index = IndexOf(a.words[j], a.value_bits);
      if (index >= a.extent || (j > 0 && IndexOf(a.words[j - 1], a.value_bits) >= index)) {
        *a.bad = 1;
      }
    }
  }
};

// out[index] += value of the code: of one share; those of several ranks one after the other.
template <typename T>
struct AddWordsKernel {
  struct Args {
    const uint32_t* words;
    int64_t count;
    int value_bits;
    T values[16];
    const int* bad;  // null: they have been checked
    T* out;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, kTile); }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    if (a.bad != nullptr && *a.bad != 0) return;
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t j = at.block * kTile + int64_t{k} * kThreads + at.thread;
      if (j >= a.count) return;
      const uint32_t word = a.words[j];
      a.out[IndexOf(word, a.value_bits)] += a.values[CodeOf(word, a.value_bits)];
    }
  }
};

}  // namespace dad::cuda
