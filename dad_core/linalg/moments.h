// A layer's gradient and the sum of the squares of its per-sample gradients, block by block, so
// that neither has to lie in memory as a whole:
//
//   G = Σ_s g_s      S = Σ_s g_s∘g_s
//
// over the samples s. For rows, a sample's gradient is g_s = D_sᵀ A_s over its rows. Where every
// row is a sample, S = (D∘D)ᵀ(A∘A): one more product; by rows that is also what is taken for
// samples of several rows.
#pragma once

#include <cstdint>
#include <vector>

#include "linalg/cpu_level.h"
#include "linalg/kernels.h"
#include "linalg/matrix.h"
#include "linalg/outer.h"
#include "linalg/residual.h"

namespace dad {

template <typename T>
class SampleMoments {
 public:
  // G is m×n. Without `squares` S is not wanted; with `by_sample` it is over samples, else over
  // rows.
  SampleMoments(CpuLevel level, int64_t m, int64_t n, bool squares, bool by_sample);

  // `samples` of equal size, one after the other; 0: every row is one. What the terms refer to must
  // stay.
  void AddRows(const RowsTerm<T>& term, int64_t samples);
  void AddIndexed(const IndexedTerm<T>& term, int64_t samples);
  // One sample, or several of which g is the sum and `square` the sum of the squares.
  void AddDense(const DenseTerm<T>& term, const T* square, const T* bias_square);

  // Packs what was added; before any call below.
  void Prepare();

  // How many rows a block has best.
  int64_t block_rows() const;

  // Rows [begin, begin + rows) of G and S, both rows×n without gaps; begin is a multiple of
  // block_rows(). Either may be null. Several threads may do so at once.
  void Block(int64_t begin, int64_t rows, T* g, T* s) const;
  // The same of the bias, which is like a column of ones in A: all m elements.
  void Bias(T* g, T* s) const;

 private:
  // Row k of x, with its row of G and its sample.
  struct IndexedRow {
    int64_t row;
    int64_t sample;
    const T* x;
    T scale;
  };
  struct Dense {
    DenseTerm<T> term;
    const T* square;
    const T* bias_square;
  };

  void AddDenseTo(int64_t begin, int64_t rows, T* g, T* s) const;
  void AddIndexedTo(int64_t begin, int64_t rows, T* g, T* s) const;
  void BiasOfRows(const RowsTerm<T>& term, int64_t samples, T* g, T* s) const;

  const CpuLevel level_;
  const int64_t m_;
  const int64_t n_;
  const bool squares_;
  const bool by_sample_;
  const linalg::Kernels<T>& kernels_;
  std::vector<std::pair<RowsTerm<T>, int64_t>> rows_;  // with their samples, 0 where rows are
  std::vector<IndexedRow> indexed_;
  int64_t next_sample_ = 0;
  std::vector<Dense> dense_;
  // Rows as samples: one product for G, one for S. Samples of several rows: one for each of them.
  std::vector<linalg::PackedOuter<T>> sum_;
  std::vector<linalg::PackedOuter<T>> sum_squares_;
  std::vector<linalg::PackedOuter<T>> by_samples_;
};

}  // namespace dad
