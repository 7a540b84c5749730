// Matrices of a few dozen rows: what subspace iteration needs of them, in double, for the host and
// for CUDA devices. One thread does it: for the ranks that are sent (1 to 64) that is microseconds,
// and the order of operations, hence every bit, is the same everywhere.
//
// Row-major, n x n. C++17, no headers of the core.
#pragma once

#include <cstdint>

#include "codec/cuda/elements.h"

namespace dad::cuda {

constexpr int kMostRank = 64;

// By Newton: the same steps on host and device. 0 for what is not positive.
DAD_HD double SquareRoot(double x) {
  if (!(x > 0) || x > 1e300) return x > 0 ? x : 0;
  // A first guess by halving the exponent.
  double root = BitsAs<double>((BitsAs<uint64_t>(x) >> 1) + (uint64_t{0x3ff} << 51));
  for (int i = 0; i < 6; ++i) root = 0.5 * (root + x / root);
  return root;
}

// For a Gram matrix G = Yᵀ Y: the upper triangular X with (Y X)ᵀ (Y X) = I, so that Y X has
// orthonormal columns. A column that depends on those before it, to `tolerance` of its own
// length squared, becomes 0 instead of noise. `g` is destroyed.
DAD_HD void OrthonormalisingFactor(int n, double tolerance, double* g, double* x) {
  for (int i = 0; i < n * n; ++i) x[i] = 0;
  // Cholesky, G = Rᵀ R, with R in the upper triangle of g.
  for (int j = 0; j < n; ++j) {
    const double length = g[j * n + j];
    double rest = length;
    for (int k = 0; k < j; ++k) rest -= g[k * n + j] * g[k * n + j];
    const bool kept = rest > tolerance * length && rest > 0;
    const double diagonal = kept ? SquareRoot(rest) : 0;
    for (int i = j + 1; i < n; ++i) {
      double sum = g[j * n + i];
      for (int k = 0; k < j; ++k) sum -= g[k * n + j] * g[k * n + i];
      g[j * n + i] = kept ? sum / diagonal : 0;
    }
    g[j * n + j] = diagonal;
  }
  // X = R⁻¹, column by column; dropped columns stay 0.
  for (int j = 0; j < n; ++j) {
    if (g[j * n + j] == 0) continue;
    x[j * n + j] = 1 / g[j * n + j];
    for (int i = j - 1; i >= 0; --i) {
      if (g[i * n + i] == 0) continue;
      double sum = 0;
      for (int k = i + 1; k <= j; ++k) sum += g[i * n + k] * x[k * n + j];
      x[i * n + j] = -sum / g[i * n + i];
    }
  }
}

// For a symmetric G with eigenvalues >= 0: G = V diag(s²) Vᵀ by cyclic Jacobi; s falls. With G = Yᵀ
// Y these are the singular values and right singular vectors of Y. `g` is destroyed.
DAD_HD void SmallSvd(int n, double* g, double* v, double* s) {
  constexpr int kSweeps = 30;  // mostly fewer than ten are needed
  for (int i = 0; i < n * n; ++i) v[i] = i / n == i % n ? 1 : 0;
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    bool rotated = false;
    for (int p = 0; p < n; ++p) {
      for (int q = p + 1; q < n; ++q) {
        const double apq = g[p * n + q];
        const double app = g[p * n + p];
        const double aqq = g[q * n + q];
        if (apq * apq <= 1e-32 * app * aqq || apq == 0) continue;
        rotated = true;
        const double theta = (aqq - app) / (2 * apq);
        const double magnitude = theta < 0 ? -theta : theta;
        const double root = magnitude > 1e150 ? magnitude : SquareRoot(theta * theta + 1);
        const double t = (theta < 0 ? -1.0 : 1.0) / (magnitude + root);
        const double c = 1 / SquareRoot(t * t + 1);
        const double sine = t * c;
        for (int k = 0; k < n; ++k) {
          const double gkp = g[k * n + p];
          const double gkq = g[k * n + q];
          g[k * n + p] = c * gkp - sine * gkq;
          g[k * n + q] = sine * gkp + c * gkq;
        }
        for (int k = 0; k < n; ++k) {
          const double gpk = g[p * n + k];
          const double gqk = g[q * n + k];
          g[p * n + k] = c * gpk - sine * gqk;
          g[q * n + k] = sine * gpk + c * gqk;
        }
        for (int k = 0; k < n; ++k) {
          const double vkp = v[k * n + p];
          const double vkq = v[k * n + q];
          v[k * n + p] = c * vkp - sine * vkq;
          v[k * n + q] = sine * vkp + c * vkq;
        }
      }
    }
    if (!rotated) break;
  }
  for (int i = 0; i < n; ++i) s[i] = SquareRoot(g[i * n + i]);
  for (int i = 0; i < n; ++i) {  // the largest first
    int largest = i;
    for (int j = i + 1; j < n; ++j) {
      if (s[j] > s[largest]) largest = j;
    }
    if (largest == i) continue;
    const double moved = s[i];
    s[i] = s[largest];
    s[largest] = moved;
    for (int k = 0; k < n; ++k) {
      const double column = v[k * n + i];
      v[k * n + i] = v[k * n + largest];
      v[k * n + largest] = column;
    }
  }
}

}  // namespace dad::cuda
