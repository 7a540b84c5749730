// The best directions of a matrix in device memory, E ≈ Σ_k ut[k]ᵀ vt[k], by subspace iteration as
// in linalg/low_rank.h. A pass, from directions V (r×n, one per row, like all here):
//
//   P = V Eᵀ;   U = orth(P);   Q = U E;   next V = Q, turned to its principal directions, at norm 1
//
// Products over E are cuBLAS's in float. What has the size of factors is widened: inner products,
// whose errors orth() would amplify, and the turns are in double, as on the host, and the r×r
// matters are kernels of codec/cuda/subspace_kernels.h. Here Q comes from U and not from P, as it
// does on the host where that saves a pass over E; the difference is rounding.
//
// Of few rows E = Dᵀ A need not be formed and nothing iterated: with U an orthonormal basis of D's
// rows, E = Uᵀ (U Dᵀ) A, and the turn of (U Dᵀ) A to its principal directions is all. That is in
// double.
//
// Everything is put on the bench's stream; nothing waits and nothing is asked of the host.
#pragma once

#include <cstdint>

#include "exchange/device/arena.h"
#include "exchange/device/bench.h"
#include "linalg/low_rank.h"

namespace dad {

// m×n, and a last column that lies by itself.
struct DeviceResidual {
  const float* weight = nullptr;
  const float* bias = nullptr;  // null: there is none
  int64_t m = 0;
  int64_t n = 0;

  int64_t columns() const { return n + (bias != nullptr ? 1 : 0); }
};

// p = v Eᵀ and q = u E, for r rows of each.
Status MultiplyRight(DeviceBench& bench, const DeviceResidual& e, int64_t r, const float* v,
                     float* p);
Status MultiplyLeft(DeviceBench& bench, const DeviceResidual& e, int64_t r, const float* u,
                    float* q);

class DeviceSubspace {
 public:
  // For Pass.
  DeviceSubspace(DeviceBench& bench, const DeviceResidual& e, const LowRankOptions& options)
      : DeviceSubspace(bench, e, options, options.rank) {}
  // For OfRows, of so many: at least options.rank, at most cuda::kMostRank. `e` says how large D
  // and A are.
  DeviceSubspace(DeviceBench& bench, const DeviceResidual& e, const LowRankOptions& options,
                 int64_t rows)
      : bench_(bench), e_(e), options_(options), r_(rows) {}

  // Before the first pass; what is taken goes back with the object.
  Status Open();
  // v: r×columns, where to start; gets where to start the next time.
  Status Pass(float* v);
  // d: rows×m, a: rows×columns; v gets where a pass would start.
  Status OfRows(const double* d, const double* a, float* v);
  // After the last: ut is r×m, vt r×columns, zeros from row *kept() on. Rows of ut are orthonormal,
  // those of vt have the singular values as norms.
  Status Factors(float* ut, float* vt);
  // How many directions `options` lets through, in device memory; none if a product was not finite.
  const int* kept() const { return kept_; }

 private:
  Status Orthonormalise();
  Status Turn(float* v);
  Status Widen(const float* from, int64_t count, double* to);

  DeviceBench& bench_;
  const DeviceResidual e_;
  const LowRankOptions options_;
  const int64_t r_;  // directions that are worked with; below it is r
  DeviceArena arena_;
  float* p_ = nullptr;      // r×m
  float* q_ = nullptr;      // r×columns
  double* tall_ = nullptr;  // r×m or r×columns
  double* u_ = nullptr;     // r×m, orthonormal
  double* v_ = nullptr;     // r×columns, turned
  double* gram_ = nullptr;  // r×r, as the next three
  double* mix_ = nullptr;
  double* turn_ = nullptr;
  double* scratch_ = nullptr;  // 2 r×r
  double* sigma_ = nullptr;    // r
  double* squares_ = nullptr;
  int64_t num_squares_ = 0;
  int* kept_ = nullptr;
};

}  // namespace dad
