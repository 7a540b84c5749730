#include "linalg/low_rank.h"

#include "linalg/products.h"
#include "matrix_fixture.h"

namespace dad {
namespace {

using matrix_test::Levels;
using matrix_test::Matrix;
using matrix_test::NaiveOuter;
using matrix_test::NaiveProduct;
using matrix_test::SameBits;
using matrix_test::Transposed;

template <typename T>
class LowRankTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(LowRankTest, Types);

// Singular values, descending: columns are turned against each other until all are
// orthogonal. Slow and sure.
std::vector<double> SingularValues(Matrix<double> x) {
  for (int sweep = 0; sweep < 40; ++sweep) {
    for (int64_t a = 0; a < x.cols(); ++a) {
      for (int64_t b = a + 1; b < x.cols(); ++b) {
        double aa = 0, bb = 0, ab = 0;
        for (int64_t i = 0; i < x.rows(); ++i) {
          aa += x.at(i, a) * x.at(i, a);
          bb += x.at(i, b) * x.at(i, b);
          ab += x.at(i, a) * x.at(i, b);
        }
        if (std::abs(ab) <= 1e-15 * std::sqrt(aa * bb)) continue;
        const double angle = 0.5 * std::atan2(2 * ab, aa - bb);
        const double c = std::cos(angle), s = std::sin(angle);
        for (int64_t i = 0; i < x.rows(); ++i) {
          const double u = x.at(i, a), v = x.at(i, b);
          x.at(i, a) = c * u + s * v;
          x.at(i, b) = c * v - s * u;
        }
      }
    }
  }
  std::vector<double> sigma;
  for (int64_t j = 0; j < x.cols(); ++j) {
    double sum = 0;
    for (int64_t i = 0; i < x.rows(); ++i) sum += x.at(i, j) * x.at(i, j);
    sigma.push_back(std::sqrt(sum));
  }
  std::sort(sigma.rbegin(), sigma.rend());
  return sigma;
}

// Σ ut[k]ᵀ vt[k].
template <typename T>
Matrix<double> Expanded(const Factors<T>& f) {
  Matrix<double> out(f.m, f.n);
  for (int k = 0; k < f.rank; ++k) {
    for (int64_t i = 0; i < f.m; ++i) {
      for (int64_t j = 0; j < f.n; ++j) {
        out.at(i, j) += static_cast<double>(f.Ut().row(k)[i]) * f.Vt().row(k)[j];
      }
    }
  }
  return out;
}

double SquaredDistance(Matrix<double> a, const Matrix<double>& b) {
  for (int64_t i = 0; i < a.rows(); ++i) {
    for (int64_t j = 0; j < a.cols(); ++j) a.at(i, j) -= b.at(i, j);
  }
  return a.SquaredNorm();
}

template <typename T>
constexpr double kClose = std::is_same_v<T, float> ? 2e-5 : 1e-10;

// U orthonormal, V orthogonal with descending norms.
template <typename T>
void ExpectInOrder(const Factors<T>& f) {
  ASSERT_EQ(f.ut.size(), static_cast<size_t>(f.rank * f.m));
  ASSERT_EQ(f.vt.size(), static_cast<size_t>(f.rank * f.n));
  std::vector<double> norms;
  for (int k = 0; k < f.rank; ++k) {
    for (int l = 0; l <= k; ++l) {
      double u = 0, v = 0;
      for (int64_t i = 0; i < f.m; ++i) {
        u += static_cast<double>(f.Ut().row(k)[i]) * f.Ut().row(l)[i];
      }
      for (int64_t j = 0; j < f.n; ++j) {
        v += static_cast<double>(f.Vt().row(k)[j]) * f.Vt().row(l)[j];
      }
      EXPECT_NEAR(u, k == l ? 1 : 0, kClose<T>);
      if (k == l) {
        norms.push_back(std::sqrt(v));
      } else {
        EXPECT_NEAR(v, 0, kClose<T> * norms[0] * norms[0]);
      }
    }
  }
  for (size_t k = 1; k < norms.size(); ++k) EXPECT_LE(norms[k], norms[k - 1] * (1 + kClose<T>));
}

// D and A whose product has singular values that fall off, with a column of ones when
// asked for.
template <typename T>
struct Gradient {
  Gradient(int64_t count, int64_t m, int64_t n, bool bias, double decay, uint32_t seed = 1) {
    d = Matrix<T>::Random(count, m, seed, 2);
    a = Matrix<T>::Random(count, n, seed + 1, 1);
    for (int64_t k = 0; k < count; ++k) {
      const T weight = static_cast<T>(std::pow(decay, static_cast<double>(k)));
      for (int64_t i = 0; i < m; ++i) d.at(k, i) *= weight;
    }
    term = {d.View(), a.View(), T(0.5), 0};
    Matrix<T> whole(count, n + (bias ? 1 : 0));
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t j = 0; j < n; ++j) whole.at(k, j) = a.at(k, j);
      if (bias) whole.at(k, n) = 1;
    }
    g = NaiveOuter(d, whole);
    for (int64_t i = 0; i < g.rows(); ++i) {
      for (int64_t j = 0; j < g.cols(); ++j) g.at(i, j) *= 0.5;
    }
  }
  Gradient(const Gradient&) = delete;

  std::span<const RowsTerm<T>> Terms() const { return {&term, 1}; }

  Matrix<T> d, a;
  RowsTerm<T> term;
  Matrix<double> g;
};

TYPED_TEST(LowRankTest, FewRowsGiveTheBestApproximation) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const bool bias : {false, true}) {
      for (const int64_t count : {1, 2, 7, 20, 33}) {
        const Gradient<T> x(count, 50, 41, bias, 0.9);
        const std::vector<double> sigma = SingularValues(x.g);
        for (const int rank : {1, 4, 100}) {
          LowRankOptions options;
          options.rank = rank;
          const Factors<T> f = LowRankOfRows<T>(level, x.Terms(), 50, 41, bias, {}, options);
          ASSERT_EQ(f.rank, std::min<int>(rank, static_cast<int>(count)));
          EXPECT_EQ(f.m, 50);
          EXPECT_EQ(f.n, bias ? 42 : 41);
          ExpectInOrder(f);
          double rest = 0;
          for (size_t k = static_cast<size_t>(f.rank); k < sigma.size(); ++k) {
            rest += sigma[k] * sigma[k];
          }
          const double error = SquaredDistance(Expanded(f), x.g);
          EXPECT_NEAR(std::sqrt(error), std::sqrt(rest), kClose<T> * sigma[0])
              << count << " rows, rank " << rank;
        }
      }
    }
  }
}

TYPED_TEST(LowRankTest, WarmSubspaceReachesTheBestEnergyInTenSteps) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const bool bias : {false, true}) {
      const Gradient<T> x(200, 50, 41, bias, 0.99);  // more rows than columns: no short cut
      const std::vector<double> sigma = SingularValues(x.g);
      LowRankOptions options;
      options.rank = 4;
      Matrix<T> v(4, bias ? 42 : 41);
      RandomStart(1, v.View());
      Factors<T> f;
      for (int i = 0; i < 10; ++i) {
        f = LowRankOfRows<T>(level, x.Terms(), 50, 41, bias, v.View(), options, v.View());
      }
      ASSERT_EQ(f.rank, 4);
      ExpectInOrder(f);
      double best = 0;
      for (size_t k = 0; k < 4; ++k) best += sigma[k] * sigma[k];
      const double captured = x.g.SquaredNorm() - SquaredDistance(Expanded(f), x.g);
      EXPECT_GE(captured, 0.98 * best);
      EXPECT_LE(captured, (1 + 1e-5) * best);
    }
  }
}

TYPED_TEST(LowRankTest, IterationsOfOneCallEqualWarmCalls) {
  using T = TypeParam;
  const Gradient<T> x(200, 50, 41, false, 0.99);
  LowRankOptions once, thrice;
  thrice.iterations = 3;
  Matrix<T> v(4, 41);
  Factors<T> warm =
      LowRankOfRows<T>(CpuLevel::kBaseline, x.Terms(), 50, 41, false, {}, once, v.View());
  for (int i = 0; i < 2; ++i) {
    warm =
        LowRankOfRows<T>(CpuLevel::kBaseline, x.Terms(), 50, 41, false, v.View(), once, v.View());
  }
  const Factors<T> f = LowRankOfRows<T>(CpuLevel::kBaseline, x.Terms(), 50, 41, false, {}, thrice);
  EXPECT_EQ(f.ut, warm.ut);
  EXPECT_EQ(f.vt, warm.vt);
}

TYPED_TEST(LowRankTest, TermsAtDifferentRowsAreOneGradient) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    const auto d1 = Matrix<T>::Random(3, 10, 1), a1 = Matrix<T>::Random(3, 25, 2);
    const auto d2 = Matrix<T>::Random(4, 12, 3), a2 = Matrix<T>::Random(4, 25, 4);
    const std::vector<RowsTerm<T>> terms = {{d1.View(), a1.View(), T(1), 2},
                                            {d2.View(), a2.View(), T(-0.5), 8}};
    Matrix<double> g(30, 25);
    const Matrix<double> g1 = NaiveOuter(d1, a1), g2 = NaiveOuter(d2, a2);
    for (int64_t j = 0; j < 25; ++j) {
      for (int64_t i = 0; i < 10; ++i) g.at(2 + i, j) += g1.at(i, j);
      for (int64_t i = 0; i < 12; ++i) g.at(8 + i, j) -= 0.5 * g2.at(i, j);
    }
    LowRankOptions options;
    options.rank = 7;
    const Factors<T> f = LowRankOfRows<T>(level, terms, 30, 25, false, {}, options);
    EXPECT_LE(SquaredDistance(Expanded(f), g), kClose<T> * g.SquaredNorm());
    EXPECT_NEAR(EnergyOfRows<T>(level, terms, 30, 25, false), g.SquaredNorm(),
                kClose<T> * g.SquaredNorm());
  }
}

TYPED_TEST(LowRankTest, EnergyOfRowsIsTheSquaredNorm) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const int64_t count : {0, 1, 33, 300}) {
      for (const bool bias : {false, true}) {
        const Gradient<T> x(count, 33, 20, bias, 0.99);
        const double expected = x.g.SquaredNorm();
        EXPECT_NEAR(EnergyOfRows<T>(level, x.Terms(), 33, 20, bias), expected, 1e-5 * expected);
      }
    }
  }
}

TYPED_TEST(LowRankTest, ToleranceAndEnergyLeaveOutSmallDirections) {
  using T = TypeParam;
  const Gradient<T> x(16, 60, 55, false, 0.5);
  const std::vector<double> sigma = SingularValues(x.g);
  for (const CpuLevel level : Levels()) {
    LowRankOptions options;
    options.rank = 10;
    options.tol = 0.1;
    const Factors<T> by_tol = LowRankOfRows<T>(level, x.Terms(), 60, 55, false, {}, options);
    int expected = 0;
    while (sigma[static_cast<size_t>(expected)] >= 0.1 * sigma[0]) ++expected;
    EXPECT_EQ(by_tol.rank, expected);

    options.tol = 0;
    options.energy = 0.9;
    const Factors<T> by_energy = LowRankOfRows<T>(level, x.Terms(), 60, 55, false, {}, options);
    double captured = 0;
    expected = 0;
    while (captured < 0.9 * x.g.SquaredNorm()) {
      captured += sigma[static_cast<size_t>(expected)] * sigma[static_cast<size_t>(expected)];
      ++expected;
    }
    EXPECT_EQ(by_energy.rank, expected);
  }
}

TYPED_TEST(LowRankTest, NoRowsOrZeroRowsGiveRankZero) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const int64_t count : {0, 3, 100}) {
      const auto a = Matrix<T>::Random(count, 20, 1);
      const Matrix<T> d(count, 30);
      const RowsTerm<T> term{d.View(), a.View(), 1, 0};
      Matrix<T> next(4, 21);
      const Factors<T> f =
          LowRankOfRows<T>(level, {&term, 1}, 30, 20, true, {}, LowRankOptions(), next.View());
      EXPECT_EQ(f.rank, 0);
      EXPECT_TRUE(f.finite);
      EXPECT_GT(next.SquaredNorm(), 0) << "the next step must be able to start";
    }
  }
}

// E = Σ of `rank` outer products; P = E V and Q = Eᵀ P for random V with r rows.
template <typename T>
struct Deficient {
  Deficient(int64_t rank, int64_t r, int64_t m, int64_t n) {
    const auto x = Matrix<T>::Random(rank, m, 1), y = Matrix<T>::Random(rank, n, 2);
    e = NaiveOuter(x, y);
    Matrix<double> v(r, n);
    RandomStart(3, v.View());
    const Matrix<double> exact_p = Transposed(NaiveProduct(e, Transposed(v)));
    const Matrix<double> exact_q = NaiveProduct(exact_p, e);
    p = Matrix<T>(r, m, 1);
    q = Matrix<T>(r, n, 1);
    for (int64_t k = 0; k < r; ++k) {
      for (int64_t i = 0; i < m; ++i) p.at(k, i) = static_cast<T>(exact_p.at(k, i));
      for (int64_t j = 0; j < n; ++j) q.at(k, j) = static_cast<T>(exact_q.at(k, j));
    }
  }
  Matrix<double> e;
  Matrix<T> p, q;
};

TYPED_TEST(LowRankTest, FinishSubspaceDropsDirectionsThatAreNotThere) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const int64_t rank : {0, 1, 2, 5}) {
      for (const int64_t r : {1, 5, 17}) {
        const Deficient<T> x(rank, r, 40, 37);
        LowRankOptions options;
        options.rank = static_cast<int>(r);
        Matrix<T> next(r, 37);
        const Factors<T> f =
            FinishSubspace<T>(level, x.p.View(), x.q.View(), options, -1, next.View());
        ASSERT_EQ(f.rank, std::min(rank, r)) << "rank " << rank << ", directions " << r;
        ExpectInOrder(f);
        if (rank <= r) {
          EXPECT_LE(SquaredDistance(Expanded(f), x.e), kClose<T> * x.e.SquaredNorm());
        }
        for (int64_t k = 0; k < r; ++k) {
          double norm = 0;
          for (int64_t j = 0; j < 37; ++j)
            norm += static_cast<double>(next.at(k, j)) * next.at(k, j);
          EXPECT_NEAR(norm, 1, k < f.rank ? 1e-4 : 0.6) << "every direction can be used again";
        }
      }
    }
  }
}

TYPED_TEST(LowRankTest, FinishSubspaceKeepsDirectionsOfVeryDifferentSize) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    // What a warm start gives: orthogonal directions with σ from 1 to 1e-4.
    constexpr int64_t kR = 5, kM = 30, kN = 20;
    Matrix<T> p(kR, kM), q(kR, kN);
    for (int64_t k = 0; k < kR; ++k) {
      const double sigma = std::pow(10.0, -static_cast<double>(k));
      p.at(k, k + 3) = static_cast<T>(sigma);
      q.at(k, k + 1) = static_cast<T>(sigma * sigma);
    }
    LowRankOptions options;
    options.rank = kR;
    const Factors<T> f = FinishSubspace<T>(level, p.View(), q.View(), options, -1);
    ASSERT_EQ(f.rank, kR);
    for (int k = 0; k < kR; ++k) {
      EXPECT_NEAR(std::abs(f.Ut().row(k)[k + 3]), 1, 1e-5);
      EXPECT_NEAR(std::abs(f.Vt().row(k)[k + 1]) * std::pow(10.0, k), 1, 1e-5);
    }
  }
}

TYPED_TEST(LowRankTest, FinishSubspaceUsesTheEnergyItIsTold) {
  using T = TypeParam;
  const Deficient<T> x(3, 3, 40, 37);
  LowRankOptions options;
  options.energy = 0.5;
  const double told = 4 * x.e.SquaredNorm();  // most of it outside of P: never reached
  EXPECT_EQ(FinishSubspace<T>(CpuLevel::kBaseline, x.p.View(), x.q.View(), options, told).rank, 3);
  EXPECT_LT(FinishSubspace<T>(CpuLevel::kBaseline, x.p.View(), x.q.View(), options, -1).rank, 3);
}

TYPED_TEST(LowRankTest, NonFiniteInputIsReportedAndHarmsNothing) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const T bad : {std::numeric_limits<T>::infinity(), std::numeric_limits<T>::quiet_NaN()}) {
      Deficient<T> x(3, 3, 40, 37);
      x.p.at(1, 2) = bad;
      auto next = Matrix<T>::Random(3, 37, 9);
      const Matrix<T> before = next;
      const Factors<T> f =
          FinishSubspace<T>(level, x.p.View(), x.q.View(), LowRankOptions(), -1, next.View());
      EXPECT_FALSE(f.finite);
      EXPECT_EQ(f.rank, 0);
      EXPECT_TRUE(SameBits(next, before));

      for (const int64_t count : {3, 100}) {
        auto d = Matrix<T>::Random(count, 30, 1);
        const auto a = Matrix<T>::Random(count, 20, 2);
        d.at(count - 1, 4) = bad;
        const RowsTerm<T> term{d.View(), a.View(), 1, 0};
        EXPECT_FALSE(
            LowRankOfRows<T>(level, {&term, 1}, 30, 20, true, {}, LowRankOptions()).finite);
      }
    }
    // Finite, but its squares are not.
    Matrix<T> huge(2, 30), other(2, 20);
    huge.Fill(std::numeric_limits<T>::max());
    other.Fill(std::numeric_limits<T>::max());
    const Factors<T> f = FinishSubspace<T>(level, huge.View(), other.View(), LowRankOptions(), -1);
    EXPECT_LE(f.rank, 2);
  }
}

TYPED_TEST(LowRankTest, RepeatsItsBits) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const int64_t count : {9, 90}) {
      const Gradient<T> x(count, 50, 41, true, 0.95);
      const auto run = [&] {
        return LowRankOfRows<T>(level, x.Terms(), 50, 41, true, {}, LowRankOptions());
      };
      const Factors<T> first = run(), second = run();
      EXPECT_EQ(first.ut, second.ut);
      EXPECT_EQ(first.vt, second.vt);
    }
  }
}

TYPED_TEST(LowRankTest, RandomStartIsAFunctionOfTheSeed) {
  using T = TypeParam;
  Matrix<T> a(3, 100), b(3, 100, 5), c(3, 100);
  RandomStart(7, a.View());
  RandomStart(7, b.View());
  RandomStart(8, c.View());
  EXPECT_TRUE(SameBits(a, b));
  EXPECT_FALSE(SameBits(a, c));
  EXPECT_NEAR(a.SquaredNorm(), 3, 0.6);
  // The same on every machine: the counters 0, 1, 2 scrambled.
  Matrix<T> three(1, 3);
  RandomStart(1, three.View());
  EXPECT_EQ(three.at(0, 0), static_cast<T>(-2211413 * 0x1p-23));
  EXPECT_EQ(three.at(0, 1), static_cast<T>(448253 * 0x1p-23));
  EXPECT_EQ(three.at(0, 2), static_cast<T>(3987931 * 0x1p-23));
}

}  // namespace
}  // namespace dad
