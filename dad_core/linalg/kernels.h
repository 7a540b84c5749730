// The innermost loops of linalg/, compiled once per CPU level (kernels_<level>.cc).
// Behind products.h, residual.h and low_rank.h; nobody else calls them.
#pragma once

#include <cstdint>

#include "linalg/cpu_level.h"

namespace dad::linalg {

// Plain pointers and function pointers throughout: what a level's file shares with the
// others must have no inline function that could be linked from the wrong one.
template <typename T>
struct Kernels {
  // A tile of Outer is tile_rows×tile_cols elements.
  int tile_rows;
  int tile_cols;

  // Copies x (rows×cols, times scale) into panels of `width` columns for Outer. x stands at
  // columns [col_begin, col_begin + cols) of total_cols, the others are zero. A panel has
  // `depth` rows, of which x becomes those from `at`.
  void (*pack)(const T* x, int64_t rows, int64_t cols, int64_t stride, T scale, int64_t col_begin,
               int64_t total_cols, int64_t width, int64_t depth, int64_t at, T* out);

  // c = beta c + dᵀ a for `rows` rows of c, from panels: d in ceil(rows / tile_rows), a in
  // ceil(cols / tile_cols). With beta 0, c is not read.
  void (*outer)(int64_t depth, const T* d, const T* a, T beta, T* c, int64_t rows, int64_t cols,
                int64_t stride);

  // p(i, k) = e[i] · v[k] over `cols` elements.
  void (*dots)(const T* e, int64_t rows, int64_t cols, int64_t e_stride, const T* v, int64_t dirs,
               int64_t v_stride, T* p, int64_t p_row_stride, int64_t p_dir_stride);

  // q[k] = Σ_i p(i, k) e[i], or q[k] += with `add`.
  void (*combine)(const T* e, int64_t rows, int64_t cols, int64_t e_stride, const T* p,
                  int64_t dirs, int64_t p_row_stride, int64_t p_dir_stride, T* q, int64_t q_stride,
                  bool add);

  void (*axpy)(T scale, const T* x, T* y, int64_t count);  // y += scale x
  double (*sum_squares)(const T* x, int64_t count);

  // Large products, by Eigen: c += alpha (aᵀ b | a b | a bᵀ), c: m×n, k summed over. Both m
  // and n above kSkinny: small ones take roads in Eigen whose bits depend on alignment.
  void (*gemm_tn)(T alpha, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* c,
                  int64_t c_stride, int64_t m, int64_t n, int64_t k);
  void (*gemm_nn)(T alpha, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* c,
                  int64_t c_stride, int64_t m, int64_t n, int64_t k);
  void (*gemm_nt)(T alpha, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* c,
                  int64_t c_stride, int64_t m, int64_t n, int64_t k);
};

inline constexpr int64_t kSkinny = 16;

// `level` is one that the machine has.
template <typename T>
const Kernels<T>& KernelsAt(CpuLevel level);

// What the files of the levels define; null if this build has no such level.
const Kernels<float>* BaselineFloatKernels();
const Kernels<double>* BaselineDoubleKernels();
const Kernels<float>* Avx2FloatKernels();
const Kernels<double>* Avx2DoubleKernels();
const Kernels<float>* Avx512FloatKernels();
const Kernels<double>* Avx512DoubleKernels();

}  // namespace dad::linalg
