// Rice coding of rising indices on the device, the format of codec/sparse_code.h bit for bit. Five
// kernels in a row: what each parameter would cost, the best parameter, the bits of each block of
// elements, where each block begins (OffsetsKernel's sums, in 64 bits), and the writing. Nothing is
// asked of the host in between; the bit stream's length stays in device memory.
//
// The count, k and the codes' bytes go before the stream: PackCodesKernel writes the codes.
#pragma once

#include <cstdint>

#include "codec/cuda/kernel.h"

namespace dad::cuda {

constexpr int kRiceParameters = 32;

template <typename W>
DAD_HD void AtomicAdd(W* at, W value) {
#if defined(__CUDA_ARCH__)
  atomicAdd(at, value);
#else
  *at += value;
#endif
}
DAD_HD void AtomicOr(uint32_t* at, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  atomicOr(at, bits);
#else
  *at |= bits;
#endif
}

// How far element j is from the one before it, less one.
DAD_HD uint32_t RiceGap(const uint32_t* index, int64_t j) {
  return j == 0 ? index[0] : index[j] - index[j - 1] - 1;
}
DAD_HD uint64_t RiceBits(uint32_t gap, int k) {
  return uint64_t{gap >> k} + 1 + static_cast<uint64_t>(k);
}

using Counter = unsigned long long;  // what CUDA has atomics for

// Adds to bits[k] what a block's elements would take with parameter k; bits are 0 before.
struct RiceCostKernel {
  struct Args {
    const uint32_t* index;
    const int64_t* count;
    int64_t capacity;
    Counter* bits;  // kRiceParameters
  };
  struct Shared {
    Counter sum[kThreads];
  };
  static constexpr int kPhases = 2;
  static int64_t Blocks(const Args& a) { return DivideUp(a.capacity, kTile); }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const int k = at.thread % kRiceParameters;
    constexpr int kParts = kThreads / kRiceParameters;
    if (phase == 0) {
      const int64_t begin = at.block * kTile;
      const int64_t end = begin + kTile < *a.count ? begin + kTile : *a.count;
      Counter sum = 0;
      for (int64_t j = begin + at.thread / kRiceParameters; j < end; j += kParts) {
        sum += RiceBits(RiceGap(a.index, j), k);
      }
      shared.sum[at.thread] = sum;
    } else if (at.thread < kRiceParameters) {
      Counter sum = 0;
      for (int part = 0; part < kParts; ++part) sum += shared.sum[part * kRiceParameters + k];
      if (sum != 0) AtomicAdd(a.bits + k, sum);
    }
  }
};

// The least k of those that need the fewest bits.
struct RiceChooseKernel {
  struct Args {
    const Counter* bits;
    int* k;
    int64_t* total_bits;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args&) { return 1; }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    if (at.thread != 0) return;
    int best = 0;
    for (int k = 1; k < kRiceParameters; ++k) {
      if (a.bits[k] < a.bits[best]) best = k;
    }
    *a.k = best;
    *a.total_bits = static_cast<int64_t>(a.bits[best]);
  }
};

// The bits of each block.
struct RiceBlockBitsKernel {
  struct Args {
    const uint32_t* index;
    const int64_t* count;
    int64_t capacity;
    const int* k;
    int64_t* block_bits;
  };
  struct Shared {
    int64_t sum[2][kThreads];
  };
  static constexpr int kPhases = kScanSteps + 2;
  static int64_t Blocks(const Args& a) { return DivideUp(a.capacity, kTile); }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    if (phase == 0) {
      const int64_t begin = at.block * kTile + int64_t{at.thread} * kPerThread;
      int64_t sum = 0;
      for (int j = 0; j < kPerThread && begin + j < *a.count; ++j) {
        sum += static_cast<int64_t>(RiceBits(RiceGap(a.index, begin + j), *a.k));
      }
      shared.sum[0][at.thread] = sum;
    } else if (phase <= kScanSteps) {
      ScanStep(shared.sum, phase - 1, at.thread);
    } else if (at.thread == kThreads - 1) {
      a.block_bits[at.block] = shared.sum[kScanSteps % 2][at.thread];
    }
  }
};

// Where each block's bits begin. One block.
struct RiceOffsetsKernel {
  struct Args {
    const int64_t* block_bits;
    int64_t num_blocks;
    int64_t* offset;
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
      for (int64_t b = begin; b < end; ++b) sum += a.block_bits[b];
      shared.sum[0][at.thread] = sum;
    } else if (phase <= kScanSteps) {
      ScanStep(shared.sum, phase - 1, at.thread);
    } else {
      int64_t offset = at.thread > 0 ? shared.sum[kScanSteps % 2][at.thread - 1] : 0;
      for (int64_t b = begin; b < end; ++b) {
        a.offset[b] = offset;
        offset += a.block_bits[b];
      }
    }
  }
};

// Writes the bits; `out` is 0 before, and as many words as the bits need. Zeros of the unary part
// are there already, so a gap is one bit and k bits behind it: at most two words.
struct RiceWriteKernel {
  struct Args {
    const uint32_t* index;
    const int64_t* count;
    int64_t capacity;
    const int* k;
    const int64_t* offset;
    uint32_t* out;  // little endian: the first bit is the lowest of the first word
  };
  struct Shared {
    int64_t sum[2][kThreads];
  };
  static constexpr int kPhases = kScanSteps + 2;
  static int64_t Blocks(const Args& a) { return DivideUp(a.capacity, kTile); }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const int64_t begin = at.block * kTile + int64_t{at.thread} * kPerThread;
    const int k = *a.k;
    if (phase == 0) {
      int64_t sum = 0;
      for (int j = 0; j < kPerThread && begin + j < *a.count; ++j) {
        sum += static_cast<int64_t>(RiceBits(RiceGap(a.index, begin + j), k));
      }
      shared.sum[0][at.thread] = sum;
    } else if (phase <= kScanSteps) {
      ScanStep(shared.sum, phase - 1, at.thread);
    } else {
      int64_t bit =
          a.offset[at.block] + (at.thread > 0 ? shared.sum[kScanSteps % 2][at.thread - 1] : 0);
      for (int j = 0; j < kPerThread && begin + j < *a.count; ++j) {
        const uint32_t gap = RiceGap(a.index, begin + j);
        bit += gap >> k;
        const uint64_t low = gap & ((uint64_t{1} << k) - 1);
        Put(a.out, bit, (low << 1) | 1, k + 1);
        bit += k + 1;
      }
    }
  }

  static DAD_HD void Put(uint32_t* out, int64_t bit, uint64_t bits, int width) {
    const int shift = static_cast<int>(bit % 32);
    const uint64_t placed = bits << shift;  // at most 32 + 31 bits
    AtomicOr(out + bit / 32, static_cast<uint32_t>(placed));
    if (shift + width > 32) AtomicOr(out + bit / 32 + 1, static_cast<uint32_t>(placed >> 32));
  }
};

// Words taken apart, for the kernels here.
struct SplitWordsKernel : ElementwiseKernel<SplitWordsKernel> {
  struct Args {
    const uint32_t* words;
    const int64_t* count;
    int64_t capacity;
    int value_bits;
    uint32_t* index;
    uint8_t* code;
  };
  static DAD_HD int64_t Count(const Args& a) { return a.capacity; }
  static DAD_HD void Element(int64_t j, const Args& a) {
    if (j >= *a.count) return;
    a.index[j] = IndexOf(a.words[j], a.value_bits);
    a.code[j] = static_cast<uint8_t>(CodeOf(a.words[j], a.value_bits));
  }
};

// Codes of four or of one bit, side by side, the first in the lowest bits; a thread per word of
// `out`. Unused bits are 0.
struct PackCodesKernel {
  struct Args {
    const uint8_t* code;
    const int64_t* count;
    int64_t capacity;
    int value_bits;
    uint32_t* out;
  };
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t PerWord(const Args& a) { return 32 / a.value_bits; }
  static int64_t Blocks(const Args& a) {
    return DivideUp(DivideUp(a.capacity, PerWord(a)), kThreads);
  }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    const int per_word = 32 / a.value_bits;
    const int64_t word = at.block * kThreads + at.thread;
    const int64_t begin = word * per_word;
    if (begin >= *a.count) return;
    uint32_t bits = 0;
    for (int j = 0; j < per_word && begin + j < *a.count; ++j) {
      bits |= static_cast<uint32_t>(a.code[begin + j]) << (j * a.value_bits);
    }
    a.out[word] = bits;
  }
};

}  // namespace dad::cuda
