#include "linalg/low_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>

// A copy of Eigen of its own, as in the files of the levels: see kernels_impl.h.
#define Eigen EigenInLowRank
#include <Eigen/Eigenvalues>

#include "linalg/kernels.h"
#include "linalg/products.h"

namespace dad {
namespace {

using linalg::Kernels;
using linalg::KernelsAt;

// A few long rows in double: what is small enough to be done carefully.
class Rows {
 public:
  Rows() = default;
  Rows(int64_t rows, int64_t cols)
      : rows_(rows), cols_(cols), values_(static_cast<size_t>(rows * cols)) {}

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  double* data() { return values_.data(); }
  const double* data() const { return values_.data(); }
  double* row(int64_t i) { return values_.data() + i * cols_; }
  const double* row(int64_t i) const { return values_.data() + i * cols_; }

 private:
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  std::vector<double> values_;
};

template <typename T>
Rows Widened(MatrixView<const T> x) {
  Rows out(x.rows, x.cols);
  for (int64_t i = 0; i < x.rows; ++i) std::copy_n(x.row(i), x.cols, out.row(i));
  return out;
}

// x yᵀ: the inner products of rows.
Rows Inner(CpuLevel level, const Rows& x, const Rows& y) {
  Rows out(x.rows(), y.rows());
  MultiplyTransposed(level, {x.data(), x.rows(), x.cols(), x.cols()},
                     {y.data(), y.rows(), y.cols(), y.cols()},
                     ViewOf(out.data(), out.rows(), out.cols()));
  return out;
}

// w x: every row of the result is a sum of rows of x.
Rows Mixed(CpuLevel level, const Rows& w, const Rows& x) {
  Rows out(w.rows(), x.cols());
  Multiply(level, {w.data(), w.rows(), w.cols(), w.cols()},
           {x.data(), x.rows(), x.cols(), x.cols()}, ViewOf(out.data(), out.rows(), out.cols()));
  return out;
}

// W with W x orthonormal, of as many rows as x has independent ones, found by a pivoted
// Cholesky decomposition of the rows' inner products. Rows are taken at norm 1, so that
// only the angles between them decide what can be told apart, not their lengths.
Rows Orthonormaliser(const Rows& gram, double zero_norm, double zero_angle) {
  const int64_t r = gram.rows();
  double largest = 0;
  for (int64_t i = 0; i < r; ++i) largest = std::max(largest, gram.row(i)[i]);
  std::vector<double> unit(static_cast<size_t>(r), 0.0);  // 1 / norm; 0: left out
  std::vector<double> pivot(static_cast<size_t>(r), 0.0);
  for (int64_t i = 0; i < r; ++i) {
    const double squared = gram.row(i)[i];
    if (!(squared > largest * zero_norm * zero_norm)) continue;
    unit[static_cast<size_t>(i)] = 1.0 / std::sqrt(squared);
    pivot[static_cast<size_t>(i)] = 1.0;
  }
  // Row k of w is the k-th orthonormal direction in terms of the rows of x.
  std::vector<std::vector<double>> w;
  std::vector<std::vector<double>> l;  // l[k][i]: component of unit row i along direction k
  while (true) {
    const auto best = std::max_element(pivot.begin(), pivot.end());
    if (best == pivot.end() || !(*best > zero_angle * zero_angle)) break;
    const auto b = static_cast<int64_t>(best - pivot.begin());
    const double length = std::sqrt(*best);
    const auto ub = static_cast<size_t>(b);
    std::vector<double> weights(static_cast<size_t>(r), 0.0);
    weights[ub] = unit[ub] / length;
    for (size_t k = 0; k < w.size(); ++k) {
      for (size_t i = 0; i < weights.size(); ++i) weights[i] -= l[k][ub] / length * w[k][i];
    }
    std::vector<double> along(static_cast<size_t>(r), 0.0);
    for (int64_t i = 0; i < r; ++i) {
      const auto ui = static_cast<size_t>(i);
      if (unit[ui] == 0) continue;
      double x = gram.row(b)[i] * unit[ub] * unit[ui];
      for (size_t k = 0; k < w.size(); ++k) x -= l[k][ub] * l[k][ui];
      along[ui] = x / length;
      pivot[ui] -= along[ui] * along[ui];
    }
    pivot[ub] = -1;
    w.push_back(std::move(weights));
    l.push_back(std::move(along));
  }
  Rows out(static_cast<int64_t>(w.size()), r);
  for (size_t k = 0; k < w.size(); ++k) {
    std::copy(w[k].begin(), w[k].end(), out.row(static_cast<int64_t>(k)));
  }
  return out;
}

struct Basis {
  Rows u;     // orthonormal
  Rows from;  // u = from x
};

// Twice: the second time mends what rounding in the inner products has cost the first.
template <typename T>
Basis Orthonormalised(CpuLevel level, const Rows& x) {
  const Rows once = Orthonormaliser(Inner(level, x, x), kZeroNorm<T>, kZeroAngle<T>);
  const Rows u = Mixed(level, once, x);
  const Rows again = Orthonormaliser(Inner(level, u, u), 0, 0);
  return {Mixed(level, again, u), Mixed(level, again, once)};
}

// The rows of w turn v into orthogonal rows, in order of their norms σ.
struct Rotation {
  Rows w;
  std::vector<double> sigma;
};

Rotation Principal(CpuLevel level, const Rows& v) {
  const int64_t r = v.rows();
  const Rows gram = Inner(level, v, v);
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(
      Eigen::Map<const Matrix>(gram.data(), r, r));  // ascending; gives up after 30 r rounds
  Rotation out{Rows(r, r), {}};
  for (int64_t k = 0; k < r; ++k) {
    const int64_t from = r - 1 - k;
    for (int64_t i = 0; i < r; ++i) out.w.row(k)[i] = solver.eigenvectors()(i, from);
    out.sigma.push_back(std::sqrt(std::max(0.0, solver.eigenvalues()(from))));
  }
  return out;
}

int CutRank(const std::vector<double>& sigma, const LowRankOptions& options, double total) {
  double captured = 0;
  int rank = 0;
  for (const double s : sigma) {
    if (rank >= options.rank || s <= 0 || s < options.tol * sigma[0]) break;
    if (options.energy > 0 && captured >= options.energy * total) break;
    captured += s * s;
    ++rank;
  }
  return rank;
}

// The first `count` rows.
Rows Top(const Rows& x, int64_t count) {
  Rows out(count, x.cols());
  std::copy_n(x.data(), count * x.cols(), out.data());
  return out;
}

template <typename T>
std::vector<T> Narrowed(const Rows& x) {
  return std::vector<T>(x.data(), x.data() + x.rows() * x.cols());
}

// Factors of uᵀ v for orthonormal rows u.
template <typename T>
Factors<T> Cut(CpuLevel level, const Rows& u, const Rows& v, const LowRankOptions& options,
               double total_energy, MatrixView<T> next_v) {
  Factors<T> out;
  out.m = u.cols();
  out.n = v.cols();
  const Rotation turn = Principal(level, v);
  double total = total_energy;
  if (total < 0) {
    total = 0;
    for (const double s : turn.sigma) total += s * s;
  }
  out.rank = CutRank(turn.sigma, options, total);
  const int64_t kept = std::min(v.rows(), std::max<int64_t>(out.rank, next_v.rows));
  const Rows turned_v = Mixed(level, Top(turn.w, kept), v);
  out.ut = Narrowed<T>(Mixed(level, Top(turn.w, out.rank), u));
  out.vt = Narrowed<T>(Top(turned_v, out.rank));

  for (int64_t k = 0; k < next_v.rows; ++k) {
    const double sigma = k < kept ? turn.sigma[static_cast<size_t>(k)] : 0;
    if (sigma > turn.sigma[0] * kZeroNorm<T>) {
      for (int64_t j = 0; j < out.n; ++j) {
        next_v.row(k)[j] = static_cast<T>(turned_v.row(k)[j] / sigma);
      }
    } else {
      RandomStart(kRefillSeed + static_cast<uint64_t>(k), next_v.Rows(k, 1));
    }
  }
  return out;
}

template <typename T>
Factors<T> NoFactors(int64_t m, int64_t n, bool finite, MatrixView<T> next_v) {
  Factors<T> out;
  out.m = m;
  out.n = n;
  out.finite = finite;
  if (finite && next_v.rows > 0) RandomStart(kRefillSeed, next_v);
  return out;
}

// All terms below each other: D is N×m, A is N×n with the bias column, if any.
template <typename T>
struct Stacked {
  std::vector<T> d;
  std::vector<T> a;
  MatrixView<const T> d_view;
  MatrixView<const T> a_view;
};

template <typename T>
Stacked<T> Stack(std::span<const RowsTerm<T>> terms, int64_t m, int64_t n, bool bias) {
  int64_t count = 0;
  for (const RowsTerm<T>& term : terms) count += term.d.rows;
  const int64_t cols = n + (bias ? 1 : 0);
  Stacked<T> out;
  out.d.assign(static_cast<size_t>(count * m), T{0});
  out.a.resize(static_cast<size_t>(count * cols));
  T* d = out.d.data();
  T* a = out.a.data();
  for (const RowsTerm<T>& term : terms) {
    for (int64_t k = 0; k < term.d.rows; ++k, d += m, a += cols) {
      for (int64_t j = 0; j < term.d.cols; ++j)
        d[term.out_begin + j] = term.scale * term.d.row(k)[j];
      std::copy_n(term.a.row(k), n, a);
      if (bias) a[n] = 1;
    }
  }
  out.d_view = {out.d.data(), count, m, m};
  out.a_view = {out.a.data(), count, cols, cols};
  return out;
}

// One turn of the subspace iteration through the rows: p = Dᵀ (A v), then q = Aᵀ (D p).
template <typename T>
void ApplyRows(CpuLevel level, const Stacked<T>& g, MatrixView<const T> v, MatrixView<T> p,
               MatrixView<T> q) {
  const Kernels<T>& kernels = KernelsAt<T>(level);
  const int64_t r = v.rows, count = g.a_view.rows;
  std::vector<T> x(static_cast<size_t>(r * count));
  const auto through = [&](MatrixView<const T> in, MatrixView<const T> from,
                           MatrixView<const T> onto, MatrixView<T> to) {
    kernels.dots(from.data, count, from.cols, from.stride, in.data, r, in.stride, x.data(), 1,
                 count);
    kernels.combine(onto.data, count, onto.cols, onto.stride, x.data(), r, 1, count, to.data,
                    to.stride, false);
  };
  through(v, g.a_view, g.d_view, p);
  through(p, g.d_view, g.a_view, q);
}

uint64_t Scrambled(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

template <typename T>
Factors<T> FinishSubspace(CpuLevel level, ConstMatrix<T> p, MatrixView<const T> q,
                          const LowRankOptions& options, double total_energy,
                          std::type_identity_t<MatrixView<T>> next_v) {
  if (!AllFinite(p) || !AllFinite(q)) return NoFactors<T>(p.cols, q.cols, false, next_v);
  const Basis basis = Orthonormalised<T>(level, Widened(p));
  if (basis.u.rows() == 0) return NoFactors<T>(p.cols, q.cols, true, next_v);
  return Cut<T>(level, basis.u, Mixed(level, basis.from, Widened(q)), options, total_energy,
                next_v);
}

template <typename T>
Factors<T> LowRankOfRows(CpuLevel level, std::span<const RowsTerm<T>> rows, int64_t m, int64_t n,
                         bool bias, std::type_identity_t<MatrixView<const T>> v_warm,
                         const LowRankOptions& options,
                         std::type_identity_t<MatrixView<T>> next_v) {
  const Stacked<T> g = Stack(rows, m, n, bias);
  const int64_t cols = g.a_view.cols, count = g.a_view.rows;
  if (!AllFinite(g.d_view) || !AllFinite(g.a_view)) return NoFactors<T>(m, cols, false, next_v);
  if (count <= options.exact_rows && count < std::min(m, cols)) {
    // G = Dᵀ A with D = (D Uᵀ) U for an orthonormal basis U of D's rows: G = Uᵀ (U Dᵀ) A.
    const Rows d = Widened(g.d_view);
    const Basis basis = Orthonormalised<T>(level, d);
    if (basis.u.rows() == 0) return NoFactors<T>(m, cols, true, next_v);
    const Rows v = Mixed(level, Inner(level, basis.u, d), Widened(g.a_view));
    return Cut<T>(level, basis.u, v, options, -1, next_v);
  }

  const int64_t r = std::min<int64_t>(options.rank, std::min(m, cols));
  std::vector<T> v(static_cast<size_t>(r * cols)), p(static_cast<size_t>(r * m)), q(v.size());
  const MatrixView<T> v_view = ViewOf(v.data(), r, cols);
  const MatrixView<T> p_view = ViewOf(p.data(), r, m), q_view = ViewOf(q.data(), r, cols);
  RandomStart(kRefillSeed, v_view);
  for (int64_t k = 0; k < std::min(r, v_warm.rows); ++k) {
    std::copy_n(v_warm.row(k), cols, v_view.row(k));
  }
  const double energy = options.energy > 0 ? EnergyOfRows(level, rows, m, n, bias) : -1;
  Factors<T> factors;
  for (int i = 0; i < std::max(1, options.iterations); ++i) {
    const bool last = i + 1 >= options.iterations;
    ApplyRows<T>(level, g, v_view, p_view, q_view);
    factors = FinishSubspace<T>(level, p_view, q_view, options, energy, last ? next_v : v_view);
  }
  return factors;
}

template <typename T>
double EnergyOfRows(CpuLevel level, std::span<const RowsTerm<T>> rows, int64_t m, int64_t n,
                    bool bias) {
  const Stacked<T> g = Stack(rows, m, n, bias);
  constexpr int64_t kBlock = 128;
  std::vector<T> of_a(kBlock * kBlock), of_d(kBlock * kBlock);
  const int64_t count = g.a_view.rows;
  double energy = 0;
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t height = std::min(kBlock, count - i);
    for (int64_t j = 0; j <= i; j += kBlock) {
      const int64_t width = std::min(kBlock, count - j);
      const auto inner = [&](MatrixView<const T> x, std::vector<T>& out) {
        MultiplyTransposed(level, x.Rows(i, height), x.Rows(j, width),
                           ViewOf(out.data(), height, width));
      };
      inner(g.a_view, of_a);
      inner(g.d_view, of_d);
      double sum = 0;
      for (int64_t k = 0; k < height * width; ++k) {
        sum += static_cast<double>(of_a[static_cast<size_t>(k)]) * of_d[static_cast<size_t>(k)];
      }
      energy += i == j ? sum : 2 * sum;
    }
  }
  return std::max(0.0, energy);
}

// Uniform in [-1, 1) has variance 1/3.
double RandomScale(int64_t cols) { return std::sqrt(3.0 / static_cast<double>(cols)); }

template <typename T>
void RandomStart(uint64_t seed, MatrixView<T> v_warm) {
  if (v_warm.empty()) return;
  const double scale = RandomScale(v_warm.cols);
  const uint64_t key = Scrambled(seed);
  uint64_t counter = 0;
  for (int64_t i = 0; i < v_warm.rows; ++i) {
    for (int64_t j = 0; j < v_warm.cols; ++j) {
      const auto bits = static_cast<int64_t>(Scrambled(key + counter++) >> 40);  // 24 of them
      v_warm.row(i)[j] = static_cast<T>(static_cast<double>(bits - (1 << 23)) * 0x1p-23 * scale);
    }
  }
}

#define DAD_INSTANTIATE(T)                                                                         \
  template Factors<T> FinishSubspace<T>(CpuLevel, ConstMatrix<T>, MatrixView<const T>,             \
                                        const LowRankOptions&, double, MatrixView<T>);             \
  template Factors<T> LowRankOfRows<T>(CpuLevel, std::span<const RowsTerm<T>>, int64_t, int64_t,   \
                                       bool, MatrixView<const T>, const LowRankOptions&,           \
                                       MatrixView<T>);                                             \
  template double EnergyOfRows<T>(CpuLevel, std::span<const RowsTerm<T>>, int64_t, int64_t, bool); \
  template void RandomStart<T>(uint64_t, MatrixView<T>)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
