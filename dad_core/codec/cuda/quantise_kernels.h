// Values as small integers and 16-bit floats, and back.
#pragma once

#include <cstdint>

#include "codec/cuda/kernel.h"

namespace dad::cuda {

// ---- int8 in buckets (codec/int_quantise.h): a block per bucket.

template <typename T>
struct QuantiseInt8Kernel : ScaledKernel<QuantiseInt8Kernel<T>, T> {
  struct Args {
    const T* x;
    int64_t count;
    int64_t bucket;
    uint8_t* out;  // scales, then bytes; aligned for a float
    T* decoded;    // null, or what receivers will have; may be x
  };
  static int64_t Blocks(const Args& a) { return DivideUp(a.count, a.bucket); }
  static DAD_HD int64_t Size(int64_t block, const Args& a) {
    const int64_t left = a.count - block * a.bucket;
    return left < a.bucket ? left : a.bucket;
  }
  static DAD_HD T Value(int64_t block, int64_t i, const Args& a) {
    return a.x[block * a.bucket + i];
  }

  static DAD_HD void Write(Where at, Word<T> largest, const Args& a) {
    const float scale = ScaleOf<T>(largest, 127);
    const T inverse = scale > 0 ? T(1) / static_cast<T>(scale) : T(0);
    auto* scales = reinterpret_cast<float*>(a.out);
    auto* ints = reinterpret_cast<int8_t*>(a.out) + DivideUp(a.count, a.bucket) * 4;
    if (at.thread == 0) scales[at.block] = scale;
    const int64_t begin = at.block * a.bucket;
    const int64_t end = begin + Size(at.block, a);
    for (int64_t i = begin + at.thread; i < end; i += kThreads) {
      const int q = scale > 0 ? ToInt(a.x[i], inverse, 127) : 0;
      ints[i] = static_cast<int8_t>(q);
      if (a.decoded != nullptr) a.decoded[i] = static_cast<T>(scale) * static_cast<T>(q);
    }
  }
};

// Of bytes that the host has checked.
template <typename T>
struct DequantiseInt8Kernel : ElementwiseKernel<DequantiseInt8Kernel<T>> {
  struct Args {
    const uint8_t* in;
    int64_t count;
    int64_t bucket;
    bool add;
    T* x;
  };

  static DAD_HD void Element(int64_t i, const Args& a) {
    const auto* scales = reinterpret_cast<const float*>(a.in);
    const auto* ints = reinterpret_cast<const int8_t*>(a.in) + DivideUp(a.count, a.bucket) * 4;
    const T value = static_cast<T>(scales[i / a.bucket]) * static_cast<T>(ints[i]);
    a.x[i] = a.add ? a.x[i] + value : value;
  }
};

// ---- Rows of factors with a scale each (codec/factor_wire.h): a block per row.

DAD_HD void WriteScale(float scale, int thread, uint8_t* out) {  // of any alignment
  if (thread < 4) out[thread] = static_cast<uint8_t>(BitsAs<uint32_t>(scale) >> (8 * thread));
}

DAD_HD int64_t Int4RowBytes(int64_t cols) { return 4 + (cols + 1) / 2; }

struct QuantiseInt4Kernel : ScaledKernel<QuantiseInt4Kernel, float> {
  struct Args {
    const float* x;
    int64_t rows;
    int64_t cols;
    uint8_t* out;    // rows of Int4RowBytes, of any alignment
    float* decoded;  // may be x
  };
  static int64_t Blocks(const Args& a) { return a.rows; }
  static DAD_HD int64_t Size(int64_t, const Args& a) { return a.cols; }
  static DAD_HD float Value(int64_t block, int64_t i, const Args& a) {
    return a.x[block * a.cols + i];
  }

  static DAD_HD void Write(Where at, Word<float> largest, const Args& a) {
    const float* x = a.x + at.block * a.cols;
    float* decoded = a.decoded + at.block * a.cols;
    const float scale = ScaleOf<float>(largest, 7);
    const float inverse = scale > 0 ? 1 / scale : 0;
    uint8_t* out = a.out + at.block * Int4RowBytes(a.cols);
    WriteScale(scale, at.thread, out);
    for (int64_t j = 2 * int64_t{at.thread}; j < a.cols; j += 2 * kThreads) {
      const bool second = j + 1 < a.cols;
      const int low = scale > 0 ? ToInt(x[j], inverse, 7) : 0;
      const int high = second && scale > 0 ? ToInt(x[j + 1], inverse, 7) : 0;
      out[4 + j / 2] = PackNibbles(low, high);
      decoded[j] = scale * static_cast<float>(low);
      if (second) decoded[j + 1] = scale * static_cast<float>(high);
    }
  }
};

struct QuantiseInt8RowsKernel : ScaledKernel<QuantiseInt8RowsKernel, float> {
  struct Args {
    const float* x;
    int64_t rows;
    int64_t cols;
    uint8_t* out;    // rows of 4 + cols bytes, of any alignment
    float* decoded;  // may be x
  };
  static int64_t Blocks(const Args& a) { return a.rows; }
  static DAD_HD int64_t Size(int64_t, const Args& a) { return a.cols; }
  static DAD_HD float Value(int64_t block, int64_t i, const Args& a) {
    return a.x[block * a.cols + i];
  }

  static DAD_HD void Write(Where at, Word<float> largest, const Args& a) {
    const float* x = a.x + at.block * a.cols;
    const float scale = ScaleOf<float>(largest, 127);
    const float inverse = scale > 0 ? 1 / scale : 0;
    uint8_t* out = a.out + at.block * (4 + a.cols);
    WriteScale(scale, at.thread, out);
    for (int64_t j = at.thread; j < a.cols; j += kThreads) {
      const int q = scale > 0 ? ToInt(x[j], inverse, 127) : 0;
      out[4 + j] = static_cast<uint8_t>(q);
      a.decoded[at.block * a.cols + j] = scale * static_cast<float>(q);
    }
  }
};

// bf16 as factors travel in it, and what receivers will have.
struct RoundBf16Kernel : ElementwiseKernel<RoundBf16Kernel> {
  struct Args {
    const float* x;
    int64_t count;
    BFloat16* out;
    float* decoded;  // may be x
  };

  static DAD_HD void Element(int64_t i, const Args& a) {
    const BFloat16 rounded = ToBFloat16(a.x[i]);
    a.out[i] = rounded;
    a.decoded[i] = ToFloat(rounded);
  }
};

}  // namespace dad::cuda
