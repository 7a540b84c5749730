// Subspace iteration beside its tall products, which are cuBLAS's (exchange/device/subspace.h):
// small matrices in double, the step between float and double, and starts. The arithmetic is that
// of linalg/low_rank.cc, with eigenvectors by Jacobi's method.
//
// A small matrix is one block's. Threads have rows or pairs of rows, and meet after each: a rank of
// 64 takes one of them tens of milliseconds, all of them one. What a thread does is the same in
// every run, so the bits are, too.
#pragma once

#include <cmath>
#include <cstdint>

#include "codec/cuda/kernel.h"

namespace dad::cuda {

constexpr int kMostRank = kThreads - 1;  // as on the wire

// Of rows x with gram = x xᵀ: w with w x orthonormal, by a pivoted Cholesky decomposition of the
// rows at norm 1. A row that is short beside the longest, or at a small angle to what the others
// span, adds no direction; for those that are missing w has rows of zeros at its end.
struct OrthonormaliseKernel {
  struct Args {
    int n;  // at most kMostRank
    double zero_norm;
    double zero_angle;
    const double* gram;  // n x n, row-major like all here
    double* scratch;     // n x n
    double* w;           // n x n
  };
  struct Shared {
    double unit[kThreads];   // 1 / norm; 0: left out
    double pivot[kThreads];  // what is left of the row's length squared
    double length;
    int best;  // -1: no direction is left
  };
  // Two for each direction: which row, then what it leaves of the others.
  static DAD_HD int Phases(const Args& a) { return 1 + 2 * a.n; }
  static int64_t Blocks(const Args& a) { return a.n > 0 ? 1 : 0; }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const int n = a.n;
    const int i = at.thread;
    if (phase == 0) {
      for (int at_w = i; at_w < n * n; at_w += kThreads) a.w[at_w] = 0;
      if (i == 0) shared.best = 0;
      if (i >= n) return;
      double largest = 0;
      for (int j = 0; j < n; ++j) {
        if (a.gram[j * n + j] > largest) largest = a.gram[j * n + j];
      }
      const double squared = a.gram[i * n + i];
      const bool counts = squared > largest * a.zero_norm * a.zero_norm;
      shared.unit[i] = counts ? 1 / sqrt(squared) : 0;
      shared.pivot[i] = counts ? 1 : 0;
    } else if (phase % 2 == 1) {
      if (i != 0 || shared.best < 0) return;
      int best = 0;
      for (int j = 1; j < n; ++j) {
        if (shared.pivot[j] > shared.pivot[best]) best = j;
      }
      const double left = shared.pivot[best];
      shared.best = left > a.zero_angle * a.zero_angle && left > 0 ? best : -1;
      shared.length = sqrt(left > 0 ? left : 0);
    } else {
      if (i >= n || shared.best < 0) return;
      const int found = phase / 2 - 1;
      const int b = shared.best;
      double* along = a.scratch + found * n;  // components of the unit rows
      double weight = i == b ? shared.unit[b] / shared.length : 0;
      double inner = a.gram[b * n + i] * shared.unit[b] * shared.unit[i];
      for (int k = 0; k < found; ++k) {
        weight -= a.scratch[k * n + b] / shared.length * a.w[k * n + i];
        inner -= a.scratch[k * n + b] * a.scratch[k * n + i];
      }
      a.w[found * n + i] = weight;
      along[i] = shared.unit[i] == 0 ? 0 : inner / shared.length;
      shared.pivot[i] = i == b ? -1 : shared.pivot[i] - along[i] * along[i];
    }
  }
};

// Of rows v with gram = v vᵀ: `turn` with orthogonal rows turn v in order of their norms σ, and
// how many of them are sent. By Jacobi's method in rounds: pairs of rows that have none in common
// are turned at once, and after n - 1 rounds every two have met.
struct PrincipalKernel {
  static constexpr int kSweeps = 15;  // mostly fewer than ten are needed
  struct Args {
    int n;     // at most kMostRank
    int most;  // directions that are sent
    double tol;
    double energy;          // 0: off
    const double* squares;  // of all that counts as energy, num_squares parts; null: Σ σ²
    int64_t num_squares;
    const double* gram;
    double* scratch;  // 2 n x n
    double* turn;     // n x n
    double* sigma;    // n, falling; all 0 if gram is not finite
    int* kept;
  };
  struct Shared {
    double cosine[kThreads / 2];
    double sine[kThreads / 2];  // 0: the pair stays
    double sigma[kThreads];
    int place[kThreads];
    int turned[3];  // whether a sweep has turned anything; by the sweep's number modulo 3
    double trace;
  };
  // Rows are padded to an even number: if n is odd, one row has no partner in each round.
  static DAD_HD int Rounds(const Args& a) { return a.n + a.n % 2 - 1; }
  static DAD_HD int Phases(const Args& a) { return 1 + 3 * kSweeps * Rounds(a) + 3; }
  static int64_t Blocks(const Args& a) { return a.n > 0 ? 1 : 0; }

  // The rows of a pair in a round, p < q. q is n for the row without a partner.
  struct Two {
    int p;
    int q;
  };
  static DAD_HD Two PairOf(int pair, int round, int rounds) {
    const int a = pair == 0 ? rounds : (round + pair) % rounds;
    const int b = pair == 0 ? round : (round - pair + rounds) % rounds;
    return a < b ? Two{a, b} : Two{b, a};
  }

  static DAD_HD void Phase(int phase, Where at, Shared& shared, const Args& a) {
    const int n = a.n;
    double* g = a.scratch;
    double* v = a.scratch + n * n;
    const int last = Phases(a) - 3;
    if (phase == 0) {
      for (int i = at.thread; i < n * n; i += kThreads) {
        g[i] = a.gram[i];
        v[i] = i / n == i % n ? 1 : 0;
      }
      if (at.thread != 0) return;
      shared.trace = 0;
      for (int i = 0; i < n; ++i) shared.trace += a.gram[i * n + i];
      shared.turned[0] = shared.turned[1] = 0;
      shared.turned[2] = 1;
    } else if (phase < last) {
      Turn(phase - 1, at, shared, a, g, v);
    } else if (phase == last) {
      if (at.thread >= n) return;
      const double squared = g[at.thread * n + at.thread];
      shared.sigma[at.thread] = IsFinite(shared.trace) && squared > 0 ? sqrt(squared) : 0;
    } else if (phase == last + 1) {
      if (at.thread >= n) return;
      int place = 0;
      for (int i = 0; i < n; ++i) {
        const bool before = i < at.thread ? shared.sigma[i] >= shared.sigma[at.thread]
                                          : shared.sigma[i] > shared.sigma[at.thread];
        if (before) ++place;
      }
      shared.place[at.thread] = place;
      a.sigma[place] = shared.sigma[at.thread];
    } else {
      for (int i = at.thread; i < n * n; i += kThreads) {
        a.turn[shared.place[i / n] * n + i % n] = v[i];
      }
      if (at.thread == 0) *a.kept = Cut(a);
    }
  }

  static DAD_HD void Turn(int step, Where at, Shared& shared, const Args& a, double* g, double* v) {
    const int n = a.n;
    const int rounds = Rounds(a);
    const int sweep = step / (3 * rounds);
    const int round = step / 3 % rounds;
    const int part = step % 3;
    if (part == 1 && round == 0 && at.thread == 0) shared.turned[(sweep + 1) % 3] = 0;
    if (shared.turned[(sweep + 2) % 3] == 0 || !IsFinite(shared.trace)) return;
    const int pairs = (rounds + 1) / 2;
    if (part == 0) {
      if (at.thread >= pairs) return;
      const Two two = PairOf(at.thread, round, rounds);
      shared.sine[at.thread] = 0;
      if (two.q >= n) return;
      const double apq = g[two.p * n + two.q];
      const double app = g[two.p * n + two.p];
      const double aqq = g[two.q * n + two.q];
      // Rounding, beside the two or beside all.
      const double floor = 1e-17 * shared.trace;
      if (apq * apq <= 1e-32 * app * aqq || apq * apq <= floor * floor) return;
      const double theta = (aqq - app) / (2 * apq);
      const double size = theta < 0 ? -theta : theta;
      const double root = size > 1e150 ? size : sqrt(theta * theta + 1);
      const double t = (theta < 0 ? -1.0 : 1.0) / (size + root);
      shared.cosine[at.thread] = 1 / sqrt(t * t + 1);
      shared.sine[at.thread] = t * shared.cosine[at.thread];
      shared.turned[sweep % 3] = 1;
      return;
    }
    for (int i = at.thread; i < pairs * n; i += kThreads) {
      const int pair = i / n;
      const int k = i % n;
      const double s = shared.sine[pair];
      if (s == 0) continue;
      const double c = shared.cosine[pair];
      const Two two = PairOf(pair, round, rounds);
      if (part == 1) {
        Rotate(c, s, g + two.p * n + k, g + two.q * n + k);
        Rotate(c, s, v + two.p * n + k, v + two.q * n + k);
      } else {
        Rotate(c, s, g + k * n + two.p, g + k * n + two.q);
      }
    }
  }

  static DAD_HD void Rotate(double c, double s, double* p, double* q) {
    const double x = *p;
    const double y = *q;
    *p = c * x - s * y;
    *q = s * x + c * y;
  }

  static DAD_HD bool IsFinite(double x) { return x - x == 0; }

  static DAD_HD int Cut(const Args& a) {
    double total = 0;
    for (int64_t i = 0; a.energy > 0 && i < a.num_squares; ++i) total += a.squares[i];
    for (int i = 0; a.squares == nullptr && i < a.n; ++i) total += a.sigma[i] * a.sigma[i];
    double captured = 0;
    int kept = 0;
    for (; kept < a.n && kept < a.most; ++kept) {
      const double s = a.sigma[kept];
      if (!(s > 0) || s < a.tol * a.sigma[0]) break;
      if (a.energy > 0 && captured >= a.energy * total) break;
      captured += s * s;
    }
    return kept;
  }
};

// Rows to double, times `scale` in float, where they have a place among others.
struct WidenRowsKernel : ElementwiseKernel<WidenRowsKernel> {
  struct Args {
    const float* from;  // rows x cols; null: ones
    int64_t rows;
    int64_t cols;
    float scale;
    double* to;
    int64_t stride;   // of `to`, from row to row
    int* not_finite;  // set if a value is not
  };
  static DAD_HD int64_t Count(const Args& a) { return a.rows * a.cols; }
  static DAD_HD void Element(int64_t i, const Args& a) {
    const float x = (a.from != nullptr ? a.from[i] : 1.0f) * a.scale;
    if (!(x - x == 0.0f)) *a.not_finite = 1;
    a.to[i / a.cols * a.stride + i % a.cols] = static_cast<double>(x);
  }
};

// To float; rows from *kept on become 0.
struct NarrowRowsKernel : ElementwiseKernel<NarrowRowsKernel> {
  struct Args {
    const double* from;  // rows x cols
    int64_t rows;
    int64_t cols;
    const int* kept;  // null: all are
    float* to;
  };
  static DAD_HD int64_t Count(const Args& a) { return a.rows * a.cols; }
  static DAD_HD void Element(int64_t i, const Args& a) {
    const int64_t count = (a.kept != nullptr ? *a.kept : a.rows) * a.cols;
    a.to[i] = i < count ? static_cast<float>(a.from[i]) : 0.0f;
  }
};

DAD_HD uint64_t Scrambled(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The start of the next pass: directions at norm 1, and random ones, those of the host's
// RandomStart for a seed per row, in place of what is next to nothing.
struct NextStartKernel : ElementwiseKernel<NextStartKernel> {
  struct Args {
    const double* v;      // rows x cols, of norms sigma
    const double* sigma;  // falling
    double zero_norm;     // beside the first
    int64_t rows;
    int64_t cols;
    uint64_t seed;  // of row 0; the next rows count on
    double scale;   // of random values from -1 to 1
    float* to;
  };
  static DAD_HD int64_t Count(const Args& a) { return a.rows * a.cols; }
  static DAD_HD void Element(int64_t i, const Args& a) {
    const int64_t row = i / a.cols;
    if (a.sigma[row] > a.sigma[0] * a.zero_norm) {
      a.to[i] = static_cast<float>(a.v[i] / a.sigma[row]);
      return;
    }
    const uint64_t key = Scrambled(a.seed + static_cast<uint64_t>(row));
    const auto bits =
        static_cast<int64_t>(Scrambled(key + static_cast<uint64_t>(i % a.cols)) >> 40);
    const double unit = static_cast<double>(bits - (1 << 23)) * (1.0 / (1 << 23));
    a.to[i] = static_cast<float>(unit * a.scale);
  }
};

}  // namespace dad::cuda
