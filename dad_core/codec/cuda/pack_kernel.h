// Copies many pieces of device memory at once, byte for byte: tensors into a fused buffer, and out
// of it. The list travels with the launch, as its argument, so nothing has to be in device memory
// first.
#pragma once

#include "codec/cuda/kernel.h"

namespace dad::cuda {

struct PackKernel {
  static constexpr int kMostPieces = 128;
  static constexpr int64_t kBlockBytes = int64_t{16} * kTile;  // that one block copies

  // By piece; those without a byte take no block.
  struct Args {
    const uint8_t* from[kMostPieces];
    uint8_t* to[kMostPieces];
    int64_t bytes[kMostPieces];
    int32_t first_block[kMostPieces];  // Σ blocks of the pieces before
    uint8_t zeros[kMostPieces];        // so many are written behind the piece
    int num_pieces;
    int32_t blocks;
  };
  static_assert(sizeof(Args) <= 4096, "arguments of a kernel have no more room");
  struct Shared {};
  static constexpr int kPhases = 1;
  static int64_t Blocks(const Args& a) { return a.blocks; }

  // One more piece; false if it has to go with another launch.
  static bool Add(Args& a, const void* from, void* to, int64_t bytes, int zeros) {
    constexpr int64_t kMostBlocks = 0x7fffffff;
    const int64_t blocks = DivideUp(bytes, kBlockBytes);
    if (a.num_pieces == kMostPieces || a.blocks + blocks > kMostBlocks) return false;
    const int i = a.num_pieces++;
    a.from[i] = static_cast<const uint8_t*>(from);
    a.to[i] = static_cast<uint8_t*>(to);
    a.bytes[i] = bytes;
    a.zeros[i] = static_cast<uint8_t>(zeros);
    a.first_block[i] = a.blocks;
    a.blocks += static_cast<int32_t>(blocks);
    return true;
  }

  static DAD_HD void Phase(int, Where at, Shared&, const Args& a) {
    int low = 0;  // the last piece that begins at or before this block
    int high = a.num_pieces;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (a.first_block[middle] <= at.block ? low : high) = middle;
    }
    const int64_t begin = (at.block - a.first_block[low]) * kBlockBytes;
    const int64_t end = begin + kBlockBytes < a.bytes[low] ? begin + kBlockBytes : a.bytes[low];
    const uint8_t* from = a.from[low];
    uint8_t* to = a.to[low];
    // Wide where both sides allow it: a tensor may begin anywhere.
    const uint64_t place = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to);
    if (place % sizeof(Wide) == 0) {
      CopyAs<Wide>(from, to, begin, end, at.thread);
    } else if (place % sizeof(uint32_t) == 0) {
      CopyAs<uint32_t>(from, to, begin, end, at.thread);
    } else {
      CopyAs<uint8_t>(from, to, begin, end, at.thread);
    }
    if (end == a.bytes[low] && at.thread < a.zeros[low]) to[end + at.thread] = 0;
  }

 private:
  struct alignas(16) Wide {
    uint32_t word[4];
  };

  // Neighbours copy neighbours; what is left at the end goes byte by byte.
  template <typename W>
  static DAD_HD void CopyAs(const uint8_t* from, uint8_t* to, int64_t begin, int64_t end,
                            int thread) {
    constexpr int64_t kWidth = sizeof(W);
    const int64_t whole = begin + (end - begin) / kWidth * kWidth;
    for (int64_t i = begin + thread * kWidth; i < whole; i += kThreads * kWidth) {
#if defined(__CUDA_ARCH__)
      *reinterpret_cast<W*>(to + i) = *reinterpret_cast<const W*>(from + i);
#else
      __builtin_memcpy(to + i, from + i, sizeof(W));
#endif
    }
    if (whole + thread < end) to[whole + thread] = from[whole + thread];
  }
};

}  // namespace dad::cuda
