// The code of the kernels, included once by the file of each CPU level, which has
// renamed the namespace Eigen before. Everything else is in an anonymous namespace and calls
// no inline function of other headers: the linker keeps one copy of such a function, and
// it could be one with instructions that a machine does not have.
#pragma once

#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>

#include "linalg/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dad::linalg {
namespace {

#define DAD_INLINE [[gnu::always_inline]] inline

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// One vector of the level, in a register and at any address.
template <typename T>
struct Simd;
template <>
struct Simd<float> {
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  typedef float InMemory __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
};
template <>
struct Simd<double> {
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef double InMemory __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
};
template <typename T>
using Vector = typename Simd<T>::Vector;
template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// The tile of Outer: as many accumulators as fit the registers, two vectors wide.
constexpr int kTileVectors = 2;
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
template <typename T>
constexpr int kTileCols = kTileVectors* kLanes<T>;

template <typename T>
DAD_INLINE Vector<T> Load(const T* from) {
  return *reinterpret_cast<const typename Simd<T>::InMemory*>(from);
}
template <typename T>
DAD_INLINE void Store(T* to, Vector<T> x) {
  *reinterpret_cast<typename Simd<T>::InMemory*>(to) = x;
}
template <typename T>
DAD_INLINE Vector<T> Broadcast(T x) {
  return x - Vector<T>{};
}

// a b + c. The compiler does not contract (-ffp-contract=off), so the fused form is asked
// for by name.
DAD_INLINE Vector<float> MultiplyAdd(Vector<float> a, Vector<float> b, Vector<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
DAD_INLINE Vector<double> MultiplyAdd(Vector<double> a, Vector<double> b, Vector<double> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

template <typename T>
DAD_INLINE T Sum(Vector<T> x) {
  T sum = x[0];
  for (int i = 1; i < kLanes<T>; ++i) sum += x[i];
  return sum;
}

DAD_INLINE int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T>
void Pack(const T* x, int64_t rows, int64_t cols, int64_t stride, T scale, int64_t col_begin,
          int64_t total_cols, int64_t width, int64_t depth, int64_t at, T* out) {
  for (int64_t panel = 0; panel * width < total_cols; ++panel) {
    T* to = out + (panel * depth + at) * width;
    const int64_t first = panel * width - col_begin;  // column of x under the panel's first
    if (first >= 0 && first + width <= cols) {
      for (int64_t k = 0; k < rows; ++k) {
        for (int64_t j = 0; j < width; ++j) to[k * width + j] = scale * x[k * stride + first + j];
      }
      continue;
    }
    for (int64_t k = 0; k < rows; ++k) {
      for (int64_t j = 0; j < width; ++j) {
        const int64_t col = first + j;
        const bool inside = col >= 0 && col < cols;
        to[k * width + j] = inside ? scale * x[k * stride + col] : T{0};
      }
    }
  }
}

// How a tile meets what was in c.
enum class Onto { kNothing, kSum, kScaled };

template <typename T, Onto onto>
DAD_INLINE void OuterTile(int64_t depth, const T* d, const T* a, T beta, T* c, int64_t stride) {
  Vector<T> sums[kTileRows][kTileVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vector<T> across[kTileVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) across[v] = Load<T>(a + v * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      const Vector<T> down = Broadcast<T>(d[i]);
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) sums[i][v] = MultiplyAdd(down, across[v], sums[i][v]);
    }
    a += kTileCols<T>;
    d += kTileRows;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      T* to = c + i * stride + v * kLanes<T>;
      if constexpr (onto == Onto::kNothing) {
        Store<T>(to, sums[i][v]);
      } else if constexpr (onto == Onto::kSum) {
        Store<T>(to, Load<T>(to) + sums[i][v]);
      } else {
        Store<T>(to, Broadcast<T>(beta) * Load<T>(to) + sums[i][v]);
      }
    }
  }
}

// A tile that hangs over the edge of c goes through a copy.
template <typename T, Onto onto>
void EdgeTile(int64_t depth, const T* d, const T* a, T beta, T* c, int64_t stride, int64_t rows,
              int64_t cols) {
  T copy[kTileRows * kTileCols<T>] = {};
  if constexpr (onto != Onto::kNothing) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) copy[i * kTileCols<T> + j] = c[i * stride + j];
    }
  }
  OuterTile<T, onto>(depth, d, a, beta, copy, kTileCols<T>);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) c[i * stride + j] = copy[i * kTileCols<T> + j];
  }
}

template <typename T, Onto onto>
void OuterOnto(int64_t depth, const T* d, const T* a, T beta, T* c, int64_t rows, int64_t cols,
               int64_t stride) {
  constexpr int64_t kAhead = 8 * kTileCols<T>;
  for (int64_t j = 0; j < cols; j += kTileCols<T>) {
    const T* a_panel = a + j * depth;
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const T* d_panel = d + i * depth;
      T* tile = c + i * stride + j;
      const int64_t tile_rows = Least(kTileRows, rows - i),
                    tile_cols = Least(kTileCols<T>, cols - j);
      // Rows are too many streams for the hardware to foresee.
      if (j + kAhead < cols) {
        for (int64_t k = 0; k < tile_rows; ++k) __builtin_prefetch(tile + k * stride + kAhead, 1);
      }
      if (tile_rows == kTileRows && tile_cols == kTileCols<T>) {
        OuterTile<T, onto>(depth, d_panel, a_panel, beta, tile, stride);
      } else {
        EdgeTile<T, onto>(depth, d_panel, a_panel, beta, tile, stride, tile_rows, tile_cols);
      }
    }
  }
}

template <typename T>
void Outer(int64_t depth, const T* d, const T* a, T beta, T* c, int64_t rows, int64_t cols,
           int64_t stride) {
  if (beta == T{0}) {
    OuterOnto<T, Onto::kNothing>(depth, d, a, beta, c, rows, cols, stride);
  } else if (beta == T{1}) {
    OuterOnto<T, Onto::kSum>(depth, d, a, beta, c, rows, cols, stride);
  } else {
    OuterOnto<T, Onto::kScaled>(depth, d, a, beta, c, rows, cols, stride);
  }
}

template <typename T, int rows, int dirs>
void DotsTile(const T* e, int64_t cols, int64_t e_stride, const T* v, int64_t v_stride, T* p,
              int64_t p_row_stride, int64_t p_dir_stride) {
  Vector<T> sums[rows][dirs] = {};
  int64_t j = 0;
  for (; j + kLanes<T> <= cols; j += kLanes<T>) {
    Vector<T> across[rows];
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) across[i] = Load<T>(e + i * e_stride + j);
#pragma GCC unroll 4
    for (int k = 0; k < dirs; ++k) {
      const Vector<T> dir = Load<T>(v + k * v_stride + j);
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i) sums[i][k] = MultiplyAdd(across[i], dir, sums[i][k]);
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int k = 0; k < dirs; ++k) {
      T sum = Sum<T>(sums[i][k]);
      for (int64_t tail = j; tail < cols; ++tail)
        sum += e[i * e_stride + tail] * v[k * v_stride + tail];
      p[i * p_row_stride + k * p_dir_stride] = sum;
    }
  }
}

template <typename T, int rows>
void DotsRows(const T* e, int64_t cols, int64_t e_stride, const T* v, int64_t dirs,
              int64_t v_stride, T* p, int64_t p_row_stride, int64_t p_dir_stride) {
  int64_t k = 0;
  for (; k + 4 <= dirs; k += 4) {
    DotsTile<T, rows, 4>(e, cols, e_stride, v + k * v_stride, v_stride, p + k * p_dir_stride,
                         p_row_stride, p_dir_stride);
  }
  v += k * v_stride;
  p += k * p_dir_stride;
  switch (dirs - k) {
    case 3:
      return DotsTile<T, rows, 3>(e, cols, e_stride, v, v_stride, p, p_row_stride, p_dir_stride);
    case 2:
      return DotsTile<T, rows, 2>(e, cols, e_stride, v, v_stride, p, p_row_stride, p_dir_stride);
    case 1:
      return DotsTile<T, rows, 1>(e, cols, e_stride, v, v_stride, p, p_row_stride, p_dir_stride);
    default: return;
  }
}

template <typename T>
void Dots(const T* e, int64_t rows, int64_t cols, int64_t e_stride, const T* v, int64_t dirs,
          int64_t v_stride, T* p, int64_t p_row_stride, int64_t p_dir_stride) {
  int64_t i = 0;
  for (; i + 3 <= rows; i += 3) {
    DotsRows<T, 3>(e + i * e_stride, cols, e_stride, v, dirs, v_stride, p + i * p_row_stride,
                   p_row_stride, p_dir_stride);
  }
  for (; i < rows; ++i) {
    DotsRows<T, 1>(e + i * e_stride, cols, e_stride, v, dirs, v_stride, p + i * p_row_stride,
                   p_row_stride, p_dir_stride);
  }
}

template <typename T, int dirs, int vectors>
DAD_INLINE void CombineTile(const T* e, int64_t rows, int64_t e_stride, const T* p,
                            int64_t p_row_stride, int64_t p_dir_stride, T* q, int64_t q_stride,
                            bool add) {
  Vector<T> sums[dirs][vectors] = {};
  for (int64_t i = 0; i < rows; ++i) {
    Vector<T> across[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) across[v] = Load<T>(e + i * e_stride + v * kLanes<T>);
#pragma GCC unroll 4
    for (int k = 0; k < dirs; ++k) {
      const Vector<T> weight = Broadcast<T>(p[i * p_row_stride + k * p_dir_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[k][v] = MultiplyAdd(weight, across[v], sums[k][v]);
    }
  }
  for (int k = 0; k < dirs; ++k) {
    for (int v = 0; v < vectors; ++v) {
      T* to = q + k * q_stride + v * kLanes<T>;
      Store<T>(to, add ? Load<T>(to) + sums[k][v] : sums[k][v]);
    }
  }
}

template <typename T, int dirs>
void CombineDirs(const T* e, int64_t rows, int64_t cols, int64_t e_stride, const T* p,
                 int64_t p_row_stride, int64_t p_dir_stride, T* q, int64_t q_stride, bool add) {
  int64_t j = 0;
  for (; j + 2 * kLanes<T> <= cols; j += 2 * kLanes<T>) {
    CombineTile<T, dirs, 2>(e + j, rows, e_stride, p, p_row_stride, p_dir_stride, q + j, q_stride,
                            add);
  }
  for (; j + kLanes<T> <= cols; j += kLanes<T>) {
    CombineTile<T, dirs, 1>(e + j, rows, e_stride, p, p_row_stride, p_dir_stride, q + j, q_stride,
                            add);
  }
  for (; j < cols; ++j) {
    for (int k = 0; k < dirs; ++k) {
      T sum = 0;
      for (int64_t i = 0; i < rows; ++i) {
        sum += p[i * p_row_stride + k * p_dir_stride] * e[i * e_stride + j];
      }
      T* to = q + k * q_stride + j;
      *to = add ? *to + sum : sum;
    }
  }
}

template <typename T>
void CombineBlock(const T* e, int64_t rows, int64_t cols, int64_t e_stride, const T* p,
                  int64_t dirs, int64_t p_row_stride, int64_t p_dir_stride, T* q, int64_t q_stride,
                  bool add) {
  int64_t k = 0;
  for (; k + 4 <= dirs; k += 4) {
    CombineDirs<T, 4>(e, rows, cols, e_stride, p + k * p_dir_stride, p_row_stride, p_dir_stride,
                      q + k * q_stride, q_stride, add);
  }
  p += k * p_dir_stride;
  q += k * q_stride;
  switch (dirs - k) {
    case 3:
      return CombineDirs<T, 3>(e, rows, cols, e_stride, p, p_row_stride, p_dir_stride, q, q_stride,
                               add);
    case 2:
      return CombineDirs<T, 2>(e, rows, cols, e_stride, p, p_row_stride, p_dir_stride, q, q_stride,
                               add);
    case 1:
      return CombineDirs<T, 1>(e, rows, cols, e_stride, p, p_row_stride, p_dir_stride, q, q_stride,
                               add);
    default: return;
  }
}

// A block of rows at a time: columns that go down through all of a large matrix would touch
// a new page at every step.
template <typename T>
void Combine(const T* e, int64_t rows, int64_t cols, int64_t e_stride, const T* p, int64_t dirs,
             int64_t p_row_stride, int64_t p_dir_stride, T* q, int64_t q_stride, bool add) {
  constexpr int64_t kBlock = 16;
  int64_t i = 0;
  do {  // once even without rows: q is written
    CombineBlock<T>(e + i * e_stride, Least(kBlock, rows - i), cols, e_stride, p + i * p_row_stride,
                    dirs, p_row_stride, p_dir_stride, q, q_stride, add || i > 0);
    i += kBlock;
  } while (i < rows);
}

template <typename T>
void Axpy(T scale, const T* x, T* y, int64_t count) {
  const Vector<T> by = Broadcast<T>(scale);
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) {
    Store<T>(y + i, by * Load<T>(x + i) + Load<T>(y + i));
  }
  for (; i < count; ++i) y[i] = scale * x[i] + y[i];
}

template <typename T>
double SumSquares(const T* x, int64_t count) {
  // Short sums in T, the long one in double.
  constexpr int64_t kChunk = 512;
  double total = 0;
  while (count > 0) {
    const int64_t n = Least(kChunk, count);
    Vector<T> sums[4] = {};
    T tail = 0;
    int64_t i = 0;
    for (; i + 4 * kLanes<T> <= n; i += 4 * kLanes<T>) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const Vector<T> y = Load<T>(x + i + v * kLanes<T>);
        sums[v] = MultiplyAdd(y, y, sums[v]);
      }
    }
    for (; i < n; ++i) tail += x[i] * x[i];
    total += static_cast<double>(Sum<T>((sums[0] + sums[1]) + (sums[2] + sums[3]))) + tail;
    x += n;
    count -= n;
  }
  return total;
}

template <typename T>
using Dynamic = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <typename T>
using ConstMap = Eigen::Map<const Dynamic<T>, 0, Eigen::OuterStride<>>;
template <typename T>
using Map = Eigen::Map<Dynamic<T>, 0, Eigen::OuterStride<>>;

template <typename T>
void GemmTn(T alpha, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* c,
            int64_t c_stride, int64_t m, int64_t n, int64_t k) {
  const ConstMap<T> left(a, k, m, Eigen::OuterStride<>(a_stride));
  const ConstMap<T> right(b, k, n, Eigen::OuterStride<>(b_stride));
  Map<T>(c, m, n, Eigen::OuterStride<>(c_stride)).noalias() += alpha * (left.transpose() * right);
}

template <typename T>
void GemmNn(T alpha, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* c,
            int64_t c_stride, int64_t m, int64_t n, int64_t k) {
  const ConstMap<T> left(a, m, k, Eigen::OuterStride<>(a_stride));
  const ConstMap<T> right(b, k, n, Eigen::OuterStride<>(b_stride));
  Map<T>(c, m, n, Eigen::OuterStride<>(c_stride)).noalias() += alpha * (left * right);
}

template <typename T>
void GemmNt(T alpha, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* c,
            int64_t c_stride, int64_t m, int64_t n, int64_t k) {
  const ConstMap<T> left(a, m, k, Eigen::OuterStride<>(a_stride));
  const ConstMap<T> right(b, n, k, Eigen::OuterStride<>(b_stride));
  Map<T>(c, m, n, Eigen::OuterStride<>(c_stride)).noalias() += alpha * (left * right.transpose());
}

// Eigen cuts its products by the sizes of the caches, so the bits would depend on the
// machine: it is given fixed ones, small enough for any machine.
bool FixCacheSizes() {
  Eigen::setCpuCacheSizes(32 << 10, 512 << 10, 2 << 20);
  return true;
}

template <typename T>
const Kernels<T>* Table() {
  static const bool fixed = FixCacheSizes();
  static const Kernels<T> table = {
      kTileRows, kTileCols<T>,  Pack<T>,   Outer<T>,  Dots<T>,   Combine<T>,
      Axpy<T>,   SumSquares<T>, GemmTn<T>, GemmNn<T>, GemmNt<T>,
  };
  return fixed ? &table : nullptr;
}

}  // namespace
}  // namespace dad::linalg
