#include "linalg/residual.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "linalg/kernels.h"
#include "linalg/outer.h"
#include "linalg/products.h"

namespace dad {
namespace {

using linalg::Kernels;
using linalg::KernelsAt;
using linalg::PackedOuter;

// More rows than this in one term: the product costs so much more than a pass over E that
// it may have one of its own.
constexpr int64_t kFusedRows = 512;

// Walks an IndexedTerm in the order of E's rows; equal indices keep theirs.
template <typename T>
class IndexedWalk {
 public:
  explicit IndexedWalk(const IndexedTerm<T>& term)
      : term_(term), order_(static_cast<size_t>(term.x.rows)) {
    std::iota(order_.begin(), order_.end(), int64_t{0});
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int64_t a, int64_t b) { return term.index[a] < term.index[b]; });
  }

  // Adds what belongs to rows below `end` and was not added before.
  void AddBelow(const Kernels<T>& kernels, int64_t end, MatrixView<T> e) {
    for (; next_ < order_.size() && term_.index[order_[next_]] < end; ++next_) {
      const int64_t k = order_[next_];
      kernels.axpy(term_.scale, term_.x.row(k), e.row(term_.index[k]), e.cols);
    }
  }

 private:
  const IndexedTerm<T>& term_;
  std::vector<int64_t> order_;
  size_t next_ = 0;
};

template <typename T>
void AddToBias(CpuLevel level, const ResidualStep<T>& step) {
  const Kernels<T>& kernels = KernelsAt<T>(level);
  const int64_t m = step.e.rows, n = step.e.cols;
  for (const RowsTerm<T>& term : step.rows) {
    ColumnSums<T>(level, term.scale, term.d, 1, step.e_bias + term.out_begin);
  }
  for (const FactorTerm<T>& term : step.factors) {
    for (int64_t k = 0; k < term.ut.rows; ++k) {
      kernels.axpy(term.scale * term.vt.row(k)[n], term.ut.row(k), step.e_bias, m);
    }
  }
  for (const DenseTerm<T>& term : step.dense) {
    if (term.g_bias != nullptr) kernels.axpy(term.scale, term.g_bias, step.e_bias, m);
  }
}

}  // namespace

template <typename T>
void RunResidualStep(CpuLevel level, const ResidualStep<T>& step) {
  const Kernels<T>& kernels = KernelsAt<T>(level);
  const int64_t m = step.e.rows, n = step.e.cols, r = step.v_warm.rows;

  std::vector<typename PackedOuter<T>::Term> outer_terms;
  for (const RowsTerm<T>& term : step.rows) {
    if (term.d.rows > kFusedRows) {
      AddOuter<T>(level, term.scale, term.d, term.a, 1, step.e.Rows(term.out_begin, term.d.cols));
    } else if (term.d.rows > 0) {
      outer_terms.push_back({term.d, term.a, term.scale, term.out_begin});
    }
  }
  for (const FactorTerm<T>& term : step.factors) {
    if (term.ut.rows > 0) outer_terms.push_back({term.ut, term.vt, term.scale, 0});
  }
  const PackedOuter<T> outer(kernels, outer_terms, m, n);
  std::vector<IndexedWalk<T>> indexed(step.indexed.begin(), step.indexed.end());
  if (step.e_bias != nullptr) AddToBias(level, step);

  double energy = 0;
  for (int64_t k = 0; k < r; ++k) std::fill_n(step.q.row(k), step.q.cols, T{0});
  const int64_t block = linalg::BlockRows(kernels, n);
  for (int64_t begin = 0; begin < m; begin += block) {
    const MatrixView<T> e = step.e.Rows(begin, std::min(block, m - begin));
    if (outer.depth() > 0) outer.AddTo(begin, 1, e);
    for (const DenseTerm<T>& term : step.dense) {
      for (int64_t i = 0; i < e.rows; ++i) {
        kernels.axpy(term.scale, term.g.row(begin + i), e.row(i), n);
      }
    }
    for (IndexedWalk<T>& walk : indexed) walk.AddBelow(kernels, begin + e.rows, step.e);
    if (step.energy != nullptr) {
      for (int64_t i = 0; i < e.rows; ++i) energy += kernels.sum_squares(e.row(i), n);
    }
    if (r == 0) continue;
    T* p = step.p.data + begin;
    kernels.dots(e.data, e.rows, n, e.stride, step.v_warm.data, r, step.v_warm.stride, p, 1,
                 step.p.stride);
    if (step.e_bias != nullptr) {
      for (int64_t k = 0; k < r; ++k) {
        kernels.axpy(step.v_warm.row(k)[n], step.e_bias + begin, p + k * step.p.stride, e.rows);
      }
    }
    kernels.combine(e.data, e.rows, n, e.stride, p, r, 1, step.p.stride, step.q.data, step.q.stride,
                    true);
  }

  if (step.e_bias != nullptr) {
    if (step.energy != nullptr) energy += kernels.sum_squares(step.e_bias, m);
    if (r > 0) {
      kernels.dots(step.p.data, r, m, step.p.stride, step.e_bias, 1, 0, step.q.data + n,
                   step.q.stride, 0);
    }
  }
  if (step.energy != nullptr) *step.energy = energy;
}

template void RunResidualStep<float>(CpuLevel, const ResidualStep<float>&);
template void RunResidualStep<double>(CpuLevel, const ResidualStep<double>&);

}  // namespace dad
