// Matrices for tests of linalg/: random, with gaps between the rows, and plain loops in
// double to compare with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "linalg/cpu_level.h"
#include "linalg/matrix.h"

namespace dad::matrix_test {

// Owns a matrix whose rows are `gap` elements apart; the gaps hold NaN, so that whoever
// reads them is found out, and must still hold it afterwards.
template <typename T>
class Matrix {
 public:
  Matrix() = default;
  Matrix(int64_t rows, int64_t cols, int64_t gap = 0)
      : rows_(rows),
        cols_(cols),
        stride_(cols + gap),
        values_(static_cast<size_t>(rows * stride_), std::numeric_limits<T>::quiet_NaN()) {
    Fill(0);
  }

  static Matrix Random(int64_t rows, int64_t cols, uint32_t seed, int64_t gap = 0) {
    Matrix out(rows, cols, gap);
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) out.at(i, j) = static_cast<T>(normal(random));
    }
    return out;
  }

  void Fill(T x) {
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < cols_; ++j) at(i, j) = x;
    }
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  T& at(int64_t i, int64_t j) { return values_[static_cast<size_t>(i * stride_ + j)]; }
  T at(int64_t i, int64_t j) const { return values_[static_cast<size_t>(i * stride_ + j)]; }
  MatrixView<T> View() { return {values_.data(), rows_, cols_, stride_}; }
  MatrixView<const T> View() const { return {values_.data(), rows_, cols_, stride_}; }

  bool GapsAreIntact() const {
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = cols_; j < stride_; ++j) {
        if (!std::isnan(at(i, j))) return false;
      }
    }
    return true;
  }

  double SquaredNorm() const {
    double sum = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < cols_; ++j) sum += static_cast<double>(at(i, j)) * at(i, j);
    }
    return sum;
  }

 private:
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  int64_t stride_ = 0;
  std::vector<T> values_;
};

template <typename T>
bool SameBits(const Matrix<T>& a, const Matrix<T>& b) {
  for (int64_t i = 0; i < a.rows(); ++i) {
    for (int64_t j = 0; j < a.cols(); ++j) {
      const T x = a.at(i, j), y = b.at(i, j);
      if (std::memcmp(&x, &y, sizeof x) != 0) return false;
    }
  }
  return a.rows() == b.rows() && a.cols() == b.cols();
}

// dᵀ a in double.
template <typename T>
Matrix<double> NaiveOuter(const Matrix<T>& d, const Matrix<T>& a) {
  Matrix<double> out(d.cols(), a.cols());
  for (int64_t k = 0; k < d.rows(); ++k) {
    for (int64_t i = 0; i < d.cols(); ++i) {
      for (int64_t j = 0; j < a.cols(); ++j) {
        out.at(i, j) += static_cast<double>(d.at(k, i)) * static_cast<double>(a.at(k, j));
      }
    }
  }
  return out;
}

// a b in double.
template <typename T>
Matrix<double> NaiveProduct(const Matrix<T>& a, const Matrix<T>& b) {
  Matrix<double> out(a.rows(), b.cols());
  for (int64_t i = 0; i < a.rows(); ++i) {
    for (int64_t k = 0; k < a.cols(); ++k) {
      for (int64_t j = 0; j < b.cols(); ++j) {
        out.at(i, j) += static_cast<double>(a.at(i, k)) * static_cast<double>(b.at(k, j));
      }
    }
  }
  return out;
}

template <typename T>
Matrix<T> Transposed(const Matrix<T>& x, int64_t gap = 0) {
  Matrix<T> out(x.cols(), x.rows(), gap);
  for (int64_t i = 0; i < x.rows(); ++i) {
    for (int64_t j = 0; j < x.cols(); ++j) out.at(j, i) = x.at(i, j);
  }
  return out;
}

// Every element within `units` roundings of T beside the largest of `expected`.
template <typename T>
void ExpectNear(const Matrix<T>& actual, const Matrix<double>& expected, double units,
                const std::string& what = "") {
  ASSERT_EQ(actual.rows(), expected.rows()) << what;
  ASSERT_EQ(actual.cols(), expected.cols()) << what;
  double largest = 1;
  for (int64_t i = 0; i < expected.rows(); ++i) {
    for (int64_t j = 0; j < expected.cols(); ++j) {
      largest = std::max(largest, std::abs(expected.at(i, j)));
    }
  }
  const double tolerance = units * std::numeric_limits<T>::epsilon() * largest;
  for (int64_t i = 0; i < expected.rows(); ++i) {
    for (int64_t j = 0; j < expected.cols(); ++j) {
      ASSERT_NEAR(actual.at(i, j), expected.at(i, j), tolerance)
          << what << " at " << i << ", " << j;
    }
  }
}

// The levels of this machine.
inline std::vector<CpuLevel> Levels() {
  std::vector<CpuLevel> levels;
  for (int i = 0; i <= static_cast<int>(BestCpuLevel()); ++i) {
    levels.push_back(static_cast<CpuLevel>(i));
  }
  return levels;
}

}  // namespace dad::matrix_test
