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

struct Size {
  int64_t m, n, k;
};
const Size kSizes[] = {{1, 1, 1},    {0, 5, 3},     {5, 0, 3},    {5, 3, 0},    {7, 33, 1},
                       {33, 7, 4},   {6, 16, 32},   {13, 17, 36}, {17, 18, 33}, {1, 40, 300},
                       {40, 1, 300}, {33, 65, 257}, {130, 70, 5}, {1025, 9, 7}, {9, 1025, 129}};

std::string Say(CpuLevel level, const Size& size) {
  return std::string(Name(level)) + " m " + std::to_string(size.m) + " n " +
         std::to_string(size.n) + " k " + std::to_string(size.k);
}

template <typename T>
class ProductsTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(ProductsTest, Types);

TYPED_TEST(ProductsTest, AddOuterAgreesWithDoubleAtEveryLevel) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const Size& size : kSizes) {
      for (const T beta : {T(0), T(1), T(-0.5)}) {
        const auto d = Matrix<T>::Random(size.k, size.m, 1, 3);
        const auto a = Matrix<T>::Random(size.k, size.n, 2, 1);
        auto c = Matrix<T>::Random(size.m, size.n, 3, 5);
        Matrix<double> expected = NaiveOuter(d, a);
        for (int64_t i = 0; i < size.m; ++i) {
          for (int64_t j = 0; j < size.n; ++j) {
            expected.at(i, j) = beta * c.at(i, j) + 0.25 * expected.at(i, j);
          }
        }
        if (beta == 0) c.Fill(std::numeric_limits<T>::quiet_NaN());
        AddOuter(level, 0.25, d.View(), a.View(), beta, c.View());
        ExpectNear(c, expected, 30, Say(level, size));
        EXPECT_TRUE(c.GapsAreIntact()) << Say(level, size);
      }
    }
  }
}

TYPED_TEST(ProductsTest, MultiplyAndMultiplyTransposedAgreeWithDoubleAtEveryLevel) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const Size& size : kSizes) {
      const auto a = Matrix<T>::Random(size.m, size.k, 1, 2);
      const auto b = Matrix<T>::Random(size.k, size.n, 2, 3);
      const Matrix<double> expected = NaiveProduct(a, b);
      Matrix<T> c(size.m, size.n, 1), ct(size.m, size.n, 4);
      c.Fill(std::numeric_limits<T>::quiet_NaN());
      ct.Fill(std::numeric_limits<T>::quiet_NaN());
      Multiply(level, a.View(), b.View(), c.View());
      const Matrix<T> bt = Transposed(b, 1);
      MultiplyTransposed(level, a.View(), bt.View(), ct.View());
      ExpectNear(c, expected, 30, Say(level, size));
      ExpectNear(ct, expected, 30, Say(level, size));
      EXPECT_TRUE(c.GapsAreIntact() && ct.GapsAreIntact()) << Say(level, size);
    }
  }
}

TYPED_TEST(ProductsTest, LargeProductsAgreeWithDoubleAtEveryLevel) {
  using T = TypeParam;
  const Size size{129, 257, 700};
  for (const CpuLevel level : Levels()) {
    const auto d = Matrix<T>::Random(size.k, size.m, 1, 3),
               a = Matrix<T>::Random(size.k, size.n, 2);
    const Matrix<double> expected = NaiveOuter(d, a);
    Matrix<T> c(size.m, size.n, 7), product(size.m, size.n), transposed(size.m, size.n);
    AddOuter(level, 1, d.View(), a.View(), 0, c.View());
    const Matrix<T> dt = Transposed(d), at = Transposed(a);
    Multiply(level, dt.View(), a.View(), product.View());
    MultiplyTransposed(level, dt.View(), at.View(), transposed.View());
    ExpectNear(c, expected, 30);
    ExpectNear(product, expected, 30);
    ExpectNear(transposed, expected, 30);
  }
}

TYPED_TEST(ProductsTest, BitsDependNeitherOnAlignmentNorOnStride) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const Size& size : {Size{18, 19, 20}, Size{33, 65, 257}, Size{40, 3, 500}, Size{3, 40, 50},
                             Size{70, 1, 129}, Size{130, 70, 700}}) {
      std::vector<Matrix<T>> outer, product, transposed;
      for (const int64_t gap : {0, 1, 3, 8}) {
        const auto d = Matrix<T>::Random(size.k, size.m, 1, gap);
        const auto a = Matrix<T>::Random(size.k, size.n, 2, 8 - gap);
        const Matrix<T> dt = Transposed(d, gap + 1), at = Transposed(a, gap);
        outer.emplace_back(size.m, size.n, gap);
        AddOuter(level, 0.3, d.View(), a.View(), 0, outer.back().View());
        product.emplace_back(size.m, size.n, gap);
        Multiply(level, dt.View(), a.View(), product.back().View());
        transposed.emplace_back(size.m, size.n, gap);
        MultiplyTransposed(level, dt.View(), at.View(), transposed.back().View());
        EXPECT_TRUE(SameBits(outer.back(), outer.front())) << Say(level, size);
        EXPECT_TRUE(SameBits(product.back(), product.front())) << Say(level, size);
        EXPECT_TRUE(SameBits(transposed.back(), transposed.front())) << Say(level, size);
      }
    }
  }
}

TYPED_TEST(ProductsTest, ExpandFactorsPutsTheLastColumnIntoTheBias) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const Size& size : {Size{33, 17, 4}, Size{7, 1025, 1}, Size{1, 1, 9}, Size{5, 4, 0}}) {
      const auto ut = Matrix<T>::Random(size.k, size.m, 1, 2);
      const auto vt = Matrix<T>::Random(size.k, size.n + 1, 2, 3);
      const Matrix<double> whole = NaiveOuter(ut, vt);
      auto c = Matrix<T>::Random(size.m, size.n, 3);
      auto bias = Matrix<T>::Random(1, size.m, 4);
      Matrix<double> expected(size.m, size.n), expected_bias(1, size.m);
      for (int64_t i = 0; i < size.m; ++i) {
        for (int64_t j = 0; j < size.n; ++j) {
          expected.at(i, j) = 2.0 * c.at(i, j) - 0.5 * whole.at(i, j);
        }
        expected_bias.at(0, i) = 2.0 * bias.at(0, i) - 0.5 * whole.at(i, size.n);
      }
      ExpandFactors(level, -0.5, ut.View(), vt.View(), 2, c.View(), bias.View().data);
      ExpectNear(c, expected, 20);
      ExpectNear(bias, expected_bias, 20);
    }
  }
}

TYPED_TEST(ProductsTest, ExpandFactorsWithoutBiasAndWithBetaZeroReadsNoOutput) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    const auto ut = Matrix<T>::Random(3, 20, 1), vt = Matrix<T>::Random(3, 30, 2);
    Matrix<T> c(20, 30);
    c.Fill(std::numeric_limits<T>::quiet_NaN());
    ExpandFactors(level, 1, ut.View(), vt.View(), 0, c.View(), nullptr);
    ExpectNear(c, NaiveOuter(ut, vt), 20);
    std::vector<T> bias(20, std::numeric_limits<T>::quiet_NaN());
    ExpandFactors(level, 1, ut.View(), vt.View(), 0, c.View().Cols(0, 29), bias.data());
    for (const T x : bias) EXPECT_TRUE(std::isfinite(x));
  }
}

TYPED_TEST(ProductsTest, ColumnSumsAddUpTheRows) {
  using T = TypeParam;
  for (const CpuLevel level : Levels()) {
    for (const int64_t k : {0, 1, 7, 300}) {
      for (const int64_t m : {1, 7, 33, 1025}) {
        const auto d = Matrix<T>::Random(k, m, 1, 2);
        auto out = Matrix<T>::Random(1, m, 2);
        Matrix<T> ones(k, 1);
        ones.Fill(1);
        Matrix<double> expected = NaiveOuter(ones, d);
        for (int64_t j = 0; j < m; ++j) {
          expected.at(0, j) = 0.5 * expected.at(0, j) + 3.0 * out.at(0, j);
        }
        ColumnSums(level, 0.5, d.View(), 3, out.View().data);
        ExpectNear(out, expected, 50);
      }
    }
  }
}

TYPED_TEST(ProductsTest, TransposeTurnsAnyShapeAndStride) {
  using T = TypeParam;
  using Size = std::pair<int64_t, int64_t>;
  for (const auto& [rows, cols] : {Size{0, 3}, {1, 1}, {1, 40}, {33, 31}, {64, 65}, {7, 200}}) {
    const auto x = Matrix<T>::Random(rows, cols, 17, 3);
    Matrix<T> c(cols, rows, 5);
    Transpose(x.View(), c.View());
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) ASSERT_EQ(c.at(j, i), x.at(i, j));
    }
    EXPECT_TRUE(c.GapsAreIntact());
  }
}

TYPED_TEST(ProductsTest, AllFiniteSeesEveryInfinityAndNaN) {
  using T = TypeParam;
  for (const int64_t cols : {1, 7, 33}) {
    auto x = Matrix<T>::Random(5, cols, 1, 2);
    EXPECT_TRUE(AllFinite(x.View()));
    for (const T bad : {std::numeric_limits<T>::infinity(), -std::numeric_limits<T>::infinity(),
                        std::numeric_limits<T>::quiet_NaN()}) {
      for (int64_t j = 0; j < cols; ++j) {
        const T before = x.at(3, j);
        x.at(3, j) = bad;
        EXPECT_FALSE(AllFinite(x.View()));
        x.at(3, j) = before;
      }
    }
    x.at(0, 0) = std::numeric_limits<T>::max();
    EXPECT_TRUE(AllFinite(x.View()));
  }
}

TEST(CpuLevelTest, NamesAreParsedBack) {
  for (int i = 0; i < kNumCpuLevels; ++i) {
    const auto level = static_cast<CpuLevel>(i);
    const Result<CpuLevel> parsed = ParseCpuLevel(Name(level));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(parsed.value(), level);
  }
  EXPECT_EQ(ParseCpuLevel("sse9").status().code(), StatusCode::kInvalidArgument);
}

TEST(CpuLevelTest, Avx512KernelsRunWhereTheCpuHasThem) {
  if (BestCpuLevel() < CpuLevel::kAvx512) GTEST_SKIP() << "this CPU has no AVX-512";
  EXPECT_EQ(Levels().size(), 3u);
}

}  // namespace
}  // namespace dad
