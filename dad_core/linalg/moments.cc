#include "linalg/moments.h"

#include <algorithm>
#include <numeric>

namespace dad {
namespace {

// out[i] = (scale x[i])².
template <typename T>
void SquareInto(const T* x, T scale, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) {
    const T scaled = scale * x[i];
    out[i] = scaled * scaled;
  }
}

template <typename T>
std::vector<T> Squared(MatrixView<const T> x, T scale) {
  std::vector<T> out(static_cast<size_t>(x.rows * x.cols));
  for (int64_t i = 0; i < x.rows; ++i) SquareInto(x.row(i), scale, x.cols, out.data() + i * x.cols);
  return out;
}

template <typename T>
void AddSquares(const T* x, int64_t count, T* s) {
  for (int64_t i = 0; i < count; ++i) s[i] += x[i] * x[i];
}

template <typename T>
void Add(const T* x, int64_t count, T* sum) {
  for (int64_t i = 0; i < count; ++i) sum[i] += x[i];
}

}  // namespace

template <typename T>
SampleMoments<T>::SampleMoments(CpuLevel level, int64_t m, int64_t n, bool squares, bool by_sample)
    : level_(level),
      m_(m),
      n_(n),
      squares_(squares),
      by_sample_(by_sample),
      kernels_(linalg::KernelsAt<T>(level)) {}

template <typename T>
void SampleMoments<T>::AddRows(const RowsTerm<T>& term, int64_t samples) {
  if (term.d.rows == 0) return;
  const bool several = by_sample_ && squares_ && samples > 0 && samples < term.d.rows;
  rows_.emplace_back(term, several ? samples : 0);
}

template <typename T>
void SampleMoments<T>::AddIndexed(const IndexedTerm<T>& term, int64_t samples) {
  const int64_t count = term.x.rows;
  const int64_t per_sample = by_sample_ && samples > 0 ? count / samples : 1;
  for (int64_t k = 0; k < count; ++k) {
    indexed_.push_back({term.index[k], next_sample_ + k / per_sample, term.x.row(k), term.scale});
  }
  next_sample_ += count;
}

template <typename T>
void SampleMoments<T>::AddDense(const DenseTerm<T>& term, const T* square, const T* bias_square) {
  dense_.push_back({term, square, bias_square});
}

template <typename T>
void SampleMoments<T>::Prepare() {
  using Term = typename linalg::PackedOuter<T>::Term;
  std::vector<Term> plain;
  std::vector<Term> squares;
  std::vector<std::vector<T>> squared;  // until they are packed
  for (const auto& [term, samples] : rows_) {
    if (samples > 0) {
      const int64_t each = term.d.rows / samples;
      for (int64_t s = 0; s < samples; ++s) {
        by_samples_.emplace_back(
            kernels_,
            std::vector<Term>{{term.d.Rows(s * each, each), term.a.Rows(s * each, each), term.scale,
                               term.out_begin}},
            m_, n_);
      }
      continue;
    }
    plain.push_back({term.d, term.a, term.scale, term.out_begin});
    if (!squares_) continue;
    const std::vector<T>& d = squared.emplace_back(Squared(term.d, term.scale));
    const MatrixView<const T> d_view = ViewOf(d.data(), term.d.rows, term.d.cols);
    const std::vector<T>& a = squared.emplace_back(Squared(term.a.Cols(0, n_), T(1)));
    squares.push_back({d_view, ViewOf(a.data(), term.a.rows, n_), T(1), term.out_begin});
  }
  if (!plain.empty()) sum_.emplace_back(kernels_, plain, m_, n_);
  if (!squares.empty()) sum_squares_.emplace_back(kernels_, squares, m_, n_);
  std::stable_sort(indexed_.begin(), indexed_.end(), [](const IndexedRow& a, const IndexedRow& b) {
    return a.row != b.row ? a.row < b.row : a.sample < b.sample;
  });
}

template <typename T>
int64_t SampleMoments<T>::block_rows() const {
  return linalg::BlockRows(kernels_, n_);
}

template <typename T>
void SampleMoments<T>::Block(int64_t begin, int64_t rows, T* g, T* s) const {
  const int64_t count = rows * n_;
  if (g != nullptr) {
    if (sum_.empty()) {
      std::fill_n(g, count, T(0));
    } else {
      sum_[0].AddTo(begin, T(0), ViewOf(g, rows, n_));
    }
  }
  if (s != nullptr) {
    if (sum_squares_.empty()) {
      std::fill_n(s, count, T(0));
    } else {
      sum_squares_[0].AddTo(begin, T(0), ViewOf(s, rows, n_));
    }
  }
  if (!by_samples_.empty()) {
    std::vector<T> one(static_cast<size_t>(count));
    for (const linalg::PackedOuter<T>& sample : by_samples_) {
      sample.AddTo(begin, T(0), ViewOf(one.data(), rows, n_));
      if (g != nullptr) Add(one.data(), count, g);
      if (s != nullptr) AddSquares(one.data(), count, s);
    }
  }
  AddIndexedTo(begin, rows, g, s);
  AddDenseTo(begin, rows, g, s);
}

template <typename T>
void SampleMoments<T>::AddIndexedTo(int64_t begin, int64_t rows, T* g, T* s) const {
  auto it = std::lower_bound(indexed_.begin(), indexed_.end(), begin,
                             [](const IndexedRow& a, int64_t row) { return a.row < row; });
  std::vector<T> one(static_cast<size_t>(n_));
  while (it != indexed_.end() && it->row < begin + rows) {
    // What one sample adds to one row of G: a token may come several times.
    const IndexedRow first = *it;
    std::fill(one.begin(), one.end(), T(0));
    for (; it != indexed_.end() && it->row == first.row && it->sample == first.sample; ++it) {
      kernels_.axpy(it->scale, it->x, one.data(), n_);
    }
    const int64_t at = (first.row - begin) * n_;
    if (g != nullptr) Add(one.data(), n_, g + at);
    if (s != nullptr) AddSquares(one.data(), n_, s + at);
  }
}

template <typename T>
void SampleMoments<T>::AddDenseTo(int64_t begin, int64_t rows, T* g, T* s) const {
  for (const Dense& dense : dense_) {
    const T scale = dense.term.scale;
    for (int64_t i = 0; i < rows; ++i) {
      const T* from = dense.term.g.row(begin + i);
      const int64_t at = i * n_;
      if (g != nullptr) kernels_.axpy(scale, from, g + at, n_);
      if (s == nullptr) continue;
      if (dense.square != nullptr) {
        kernels_.axpy(scale * scale, dense.square + (begin + i) * n_, s + at, n_);
      } else {
        for (int64_t j = 0; j < n_; ++j) s[at + j] += (scale * from[j]) * (scale * from[j]);
      }
    }
  }
}

template <typename T>
void SampleMoments<T>::BiasOfRows(const RowsTerm<T>& term, int64_t samples, T* g, T* s) const {
  const int64_t count = samples > 0 ? samples : term.d.rows;
  const int64_t each = term.d.rows / count;
  std::vector<T> one(static_cast<size_t>(term.d.cols));
  for (int64_t sample = 0; sample < count; ++sample) {
    std::fill(one.begin(), one.end(), T(0));
    for (int64_t k = 0; k < each; ++k) {
      kernels_.axpy(term.scale, term.d.row(sample * each + k), one.data(), term.d.cols);
    }
    Add(one.data(), term.d.cols, g + term.out_begin);
    if (s != nullptr) AddSquares(one.data(), term.d.cols, s + term.out_begin);
  }
}

template <typename T>
void SampleMoments<T>::Bias(T* g, T* s) const {
  std::fill_n(g, m_, T(0));
  if (s != nullptr) std::fill_n(s, m_, T(0));
  for (const auto& [term, samples] : rows_) BiasOfRows(term, samples, g, s);
  for (const Dense& dense : dense_) {
    if (dense.term.g_bias == nullptr) continue;
    const T scale = dense.term.scale;
    kernels_.axpy(scale, dense.term.g_bias, g, m_);
    if (s == nullptr) continue;
    for (int64_t j = 0; j < m_; ++j) {
      const T x = scale * dense.term.g_bias[j];
      s[j] += dense.bias_square != nullptr ? scale * scale * dense.bias_square[j] : x * x;
    }
  }
}

template class SampleMoments<float>;
template class SampleMoments<double>;

}  // namespace dad
