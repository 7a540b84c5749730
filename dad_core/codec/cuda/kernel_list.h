// The kernels of libdad_cuda.so by name: X(name, kernel). launch.cu makes an entry of each, the
// core finds them by it (exchange/device/bench.h), and the tests put their emulation in their
// place.
#pragma once

#include "codec/cuda/feedback_kernels.h"
#include "codec/cuda/layer_kernels.h"
#include "codec/cuda/pack_kernel.h"
#include "codec/cuda/qsgd_kernels.h"
#include "codec/cuda/quantise_kernels.h"
#include "codec/cuda/result_kernels.h"
#include "codec/cuda/rice_kernels.h"
#include "codec/cuda/sparse_kernels.h"
#include "codec/cuda/subspace_kernels.h"
#include "codec/cuda/tau_kernels.h"

// Of one type, which the name ends with.
#define DAD_CUDA_KERNELS_OF(X, type, T)              \
  X(quantise_int8_##type, QuantiseInt8Kernel<T>)     \
  X(dequantise_int8_##type, DequantiseInt8Kernel<T>) \
  X(accumulate_##type, AccumulateKernel<T>)          \
  X(gather_##type, GatherKernel<T>)                  \
  X(top_##type, TopKernel<T>)                        \
  X(encode_vgc_##type, EncodeVgcKernel<T>)           \
  X(encode_strom_##type, EncodeStromKernel<T>)       \
  X(add_words_##type, AddWordsKernel<T>)             \
  X(sum_squares_##type, SumSquaresKernel<T>)         \
  X(tau_##type, TauKernel<T>)                        \
  X(add_kept_##type, AddKeptKernel<T>)               \
  X(square_##type, SquareKernel<T>)                  \
  X(left_##type, LeftKernel<T>)                      \
  X(encode_qsgd_##type, EncodeQsgdKernel<T>)         \
  X(add_qsgd_##type, AddQsgdKernel<T>)

#define DAD_CUDA_KERNELS(X)                         \
  X(widen_f16_f32, WidenKernel<Half>)               \
  X(widen_bf16_f32, WidenKernel<BFloat16>)          \
  X(widen_f32_f64, WidenKernel<float, double>)      \
  X(result_f32_f32, ResultKernel<float, float>)     \
  X(result_f32_f16, ResultKernel<float, Half>)      \
  X(result_f32_bf16, ResultKernel<float, BFloat16>) \
  X(result_f64_f64, ResultKernel<double, double>)   \
  X(result_f64_f32, ResultKernel<double, float>)    \
  X(add_rows_f32, AddRowsKernel<float>)             \
  X(transpose_f32, TransposeKernel<float>)          \
  X(quantise_int4_rows_f32, QuantiseInt4Kernel)     \
  X(quantise_int8_rows_f32, QuantiseInt8RowsKernel) \
  X(round_bf16, RoundBf16Kernel)                    \
  X(orthonormalise, OrthonormaliseKernel)           \
  X(principal, PrincipalKernel)                     \
  X(widen_rows, WidenRowsKernel)                    \
  X(narrow_rows, NarrowRowsKernel)                  \
  X(next_start, NextStartKernel)                    \
  X(offsets, OffsetsKernel)                         \
  X(split_words, SplitWordsKernel)                  \
  X(rice_cost, RiceCostKernel)                      \
  X(rice_choose, RiceChooseKernel)                  \
  X(rice_block_bits, RiceBlockBitsKernel)           \
  X(rice_offsets, RiceOffsetsKernel)                \
  X(rice_write, RiceWriteKernel)                    \
  X(pack_codes, PackCodesKernel)                    \
  X(pack, PackKernel)                               \
  DAD_CUDA_KERNELS_OF(X, f32, float)                \
  DAD_CUDA_KERNELS_OF(X, f64, double)
