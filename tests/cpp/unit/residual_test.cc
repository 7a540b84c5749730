#include "linalg/residual.h"

#include "linalg/low_rank.h"
#include "linalg/products.h"
#include "matrix_fixture.h"

namespace dad {
namespace {

using matrix_test::ExpectNear;
using matrix_test::Levels;
using matrix_test::Matrix;
using matrix_test::NaiveOuter;
using matrix_test::NaiveProduct;
using matrix_test::SameBits;
using matrix_test::Transposed;

template <typename T>
class ResidualTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(ResidualTest, Types);

// A step with terms of every kind, and what has to come out in double: the bias as column
// n of everything.
template <typename T>
struct Case {
  Case(int64_t m, int64_t n, int64_t rows, int64_t r, bool bias)
      : m(m), n(n), bias(bias), cols(n + (bias ? 1 : 0)) {
    e = Matrix<T>::Random(m, n, 1, 3);
    e_bias = Matrix<T>::Random(1, m, 2);
    d = Matrix<T>::Random(rows, m, 3, 1);
    a = Matrix<T>::Random(rows, n, 4, 2);
    part_begin = m / 3;
    part_d = Matrix<T>::Random(2, m - part_begin - m / 4, 5);
    part_a = Matrix<T>::Random(2, n, 6);
    ut = Matrix<T>::Random(r, m, 7);
    vt = Matrix<T>::Random(r, cols, 8, 1);
    x = Matrix<T>::Random(m > 0 ? 5 : 0, n, 9, 1);
    for (int64_t k = 0; k < x.rows(); ++k) index.push_back((k * k * 7 + m - 1) % m);
    if (index.size() > 1) index[1] = index[0];
    g = Matrix<T>::Random(m, n, 10);
    g_bias = Matrix<T>::Random(1, m, 11);
    v = Matrix<T>::Random(r, cols, 12, 2);
    p = Matrix<T>(r, m, 1);
    q = Matrix<T>(r, cols, 3);
    rows_terms = {{d.View(), a.View(), T(0.5), 0},
                  {part_d.View(), part_a.View(), T(-2), part_begin}};
    factor_terms = {{ut.View(), vt.View(), T(-1)}};
    indexed_terms = {{index.data(), x.View(), T(3)}};
    dense_terms = {{g.View(), bias ? g_bias.View().data : nullptr, T(0.25)}};
  }

  Matrix<double> Expected() const {
    Matrix<double> out(m, cols);
    const auto add = [&](const Matrix<double>& term, double scale, int64_t row_begin) {
      for (int64_t i = 0; i < term.rows(); ++i) {
        for (int64_t j = 0; j < term.cols(); ++j) {
          out.at(row_begin + i, j) += scale * term.at(i, j);
        }
      }
    };
    const auto add_ones = [&](const Matrix<T>& of, double scale, int64_t row_begin) {
      for (int64_t k = 0; k < of.rows() && bias; ++k) {
        for (int64_t i = 0; i < of.cols(); ++i) out.at(row_begin + i, n) += scale * of.at(k, i);
      }
    };
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) out.at(i, j) = e.at(i, j) + 0.25 * g.at(i, j);
      if (bias) out.at(i, n) = e_bias.at(0, i) + 0.25 * g_bias.at(0, i);
    }
    add(NaiveOuter(d, a), 0.5, 0);
    add_ones(d, 0.5, 0);
    add(NaiveOuter(part_d, part_a), -2, part_begin);
    add_ones(part_d, -2, part_begin);
    add(NaiveOuter(ut, vt), -1, 0);
    for (int64_t k = 0; k < x.rows(); ++k) {
      for (int64_t j = 0; j < n; ++j) out.at(index[static_cast<size_t>(k)], j) += 3.0 * x.at(k, j);
    }
    return out;
  }

  ResidualStep<T> Step() {
    ResidualStep<T> step;
    step.e = e.View();
    step.e_bias = bias ? e_bias.View().data : nullptr;
    step.rows = rows_terms;
    step.factors = factor_terms;
    step.indexed = indexed_terms;
    step.dense = dense_terms;
    step.v_warm = v.View();
    step.p = p.View();
    step.q = q.View();
    step.energy = &energy;
    return step;
  }

  // E with the bias as a column.
  Matrix<T> Whole() const {
    Matrix<T> out(m, cols);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) out.at(i, j) = e.at(i, j);
      if (bias) out.at(i, n) = e_bias.at(0, i);
    }
    return out;
  }

  int64_t m, n;
  bool bias;
  int64_t cols, part_begin;
  Matrix<T> e, e_bias, d, a, part_d, part_a, ut, vt, x, g, g_bias, v, p, q;
  std::vector<int64_t> index;
  std::vector<RowsTerm<T>> rows_terms;
  std::vector<FactorTerm<T>> factor_terms;
  std::vector<IndexedTerm<T>> indexed_terms;
  std::vector<DenseTerm<T>> dense_terms;
  double energy = -1;
};

struct Size {
  int64_t m, n, rows, r;
};
const Size kSizes[] = {{1, 1, 1, 1},    {7, 33, 3, 2},     {33, 7, 0, 3},    {64, 48, 32, 4},
                       {1025, 9, 5, 5}, {9, 1025, 130, 7}, {50, 60, 600, 4}, {130, 3000, 8, 16}};

TYPED_TEST(ResidualTest, AddsEveryKindOfTermAndMultipliesOnTheWay) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const Size& size : kSizes) {
      for (const bool bias : {false, true}) {
        Case<T> c(size.m, size.n, size.rows, size.r, bias);
        const Matrix<double> e = c.Expected();
        RunResidualStep(level, c.Step());
        const std::string what = std::string(Name(level)) + " " + std::to_string(size.m) + "x" +
                                 std::to_string(size.n) + (bias ? " with bias" : "");
        ExpectNear(c.Whole(), e, 100, what);
        const Matrix<T> whole = c.Whole();
        ExpectNear(c.p, Transposed(NaiveProduct(whole, Transposed(c.v))), 100, what);
        ExpectNear(c.q, NaiveProduct(c.p, whole), 200, what);
        EXPECT_NEAR(c.energy, whole.SquaredNorm(), 1e-5 * whole.SquaredNorm()) << what;
        EXPECT_TRUE(c.e.GapsAreIntact() && c.p.GapsAreIntact() && c.q.GapsAreIntact()) << what;
      }
    }
  }
}

TYPED_TEST(ResidualTest, RepeatsItsBits) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    Case<T> first(130, 500, 33, 4, true), second(130, 500, 33, 4, true);
    RunResidualStep(level, first.Step());
    RunResidualStep(level, second.Step());
    EXPECT_TRUE(SameBits(first.e, second.e) && SameBits(first.p, second.p) &&
                SameBits(first.q, second.q) && SameBits(first.e_bias, second.e_bias));
  }
}

TYPED_TEST(ResidualTest, WithoutTermsOnlyReads) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    Case<T> c(40, 50, 3, 3, false);
    const Matrix<T> before = c.e;
    ResidualStep<T> step = c.Step();
    step.rows = {};
    step.factors = {};
    step.indexed = {};
    step.dense = {};
    RunResidualStep(level, step);
    EXPECT_TRUE(SameBits(c.e, before));
    ExpectNear(c.p, Transposed(NaiveProduct(before, Transposed(c.v))), 100);
  }
}

TYPED_TEST(ResidualTest, WithoutDirectionsOnlyAdds) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    Case<T> c(40, 50, 3, 3, true);
    const Matrix<double> expected = c.Expected();
    ResidualStep<T> step = c.Step();
    step.v_warm = {};
    step.p = {};
    step.q = {};
    step.energy = nullptr;
    RunResidualStep(level, step);
    ExpectNear(c.Whole(), expected, 100);
  }
}

TYPED_TEST(ResidualTest, EmptyMatrixIsLeftAlone) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const auto& [m, n] : {std::pair<int64_t, int64_t>{0, 5}, {5, 0}}) {
      Matrix<T> e(m, n), v = Matrix<T>::Random(2, n, 1), p(2, m), q(2, n);
      ResidualStep<T> step;
      step.e = e.View();
      step.v_warm = v.View();
      step.p = p.View();
      step.q = q.View();
      RunResidualStep(level, step);
      EXPECT_EQ(p.SquaredNorm() + q.SquaredNorm(), 0);
    }
  }
}

// The identity of error feedback: what was sent and what is kept add up to the gradients.
TYPED_TEST(ResidualTest, SentPlusKeptEqualsAllGradients) {
  using T = TypeParam;
  constexpr int64_t kM = 60, kN = 45;
  for (const CpuLevel level : Levels()) {
    Matrix<T> e(kM, kN), e_bias(1, kM);
    Matrix<double> all(kM, kN + 1), sent(kM, kN + 1);
    Matrix<T> v(3, kN + 1), p(3, kM), q(3, kN + 1);
    RandomStart(5, v.View());
    Factors<T> last;
    for (uint32_t t = 0; t < 12; ++t) {
      const auto d = Matrix<T>::Random(8, kM, 2 * t), a = Matrix<T>::Random(8, kN, 2 * t + 1);
      const Matrix<double> g = NaiveOuter(d, a);
      for (int64_t i = 0; i < kM; ++i) {
        for (int64_t j = 0; j < kN; ++j) all.at(i, j) += g.at(i, j);
        for (int64_t k = 0; k < 8; ++k) all.at(i, kN) += d.at(k, i);
      }
      const RowsTerm<T> rows{d.View(), a.View(), 1, 0};
      const FactorTerm<T> minus{last.Ut(), last.Vt(), -1};
      ResidualStep<T> step;
      step.e = e.View();
      step.e_bias = e_bias.View().data;
      step.rows = {&rows, 1};
      if (last.rank > 0) step.factors = {&minus, 1};
      step.v_warm = v.View();
      step.p = p.View();
      step.q = q.View();
      RunResidualStep(level, step);
      LowRankOptions options;
      options.rank = 3;
      last = FinishSubspace<T>(level, p.View(), q.View(), options, -1, v.View());
      ASSERT_EQ(last.rank, 3);
      for (int k = 0; k < last.rank; ++k) {
        for (int64_t i = 0; i < kM; ++i) {
          for (int64_t j = 0; j <= kN; ++j) {
            sent.at(i, j) += static_cast<double>(last.Ut().row(k)[i]) * last.Vt().row(k)[j];
          }
        }
      }
    }
    ExpandFactors<T>(level, -1, last.Ut(), last.Vt(), 1, e.View(), e_bias.View().data);
    for (int64_t i = 0; i < kM; ++i) {
      for (int64_t j = 0; j < kN; ++j) sent.at(i, j) += e.at(i, j);
      sent.at(i, kN) += e_bias.at(0, i);
    }
    Matrix<T> rounded(kM, kN + 1);
    for (int64_t i = 0; i < kM; ++i) {
      for (int64_t j = 0; j <= kN; ++j) rounded.at(i, j) = static_cast<T>(sent.at(i, j));
    }
    ExpectNear(rounded, all, 100);
  }
}

}  // namespace
}  // namespace dad
