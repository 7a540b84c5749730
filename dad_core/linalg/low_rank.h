// The best directions of a gradient: G ≈ Σ_k ut[k]ᵀ vt[k].
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "linalg/cpu_level.h"
#include "linalg/matrix.h"
#include "linalg/residual.h"

namespace dad {

// A direction shorter than this beside the longest, or at a smaller angle to what the others span,
// is none: it would be rounding.
template <typename T>
inline constexpr double kZeroNorm = std::is_same_v<T, float> ? 1e-7 : 1e-14;
template <typename T>
inline constexpr double kZeroAngle = std::is_same_v<T, float> ? 1e-5 : 1e-7;

struct LowRankOptions {
  int rank = 4;         // at most so many directions
  double tol = 0;       // a direction with σ < tol σ₁ is left out
  double energy = 0;    // enough directions for this part of ‖G‖²; 0: off
  int iterations = 1;   // of the subspace iteration, where one is needed
  int exact_rows = 64;  // LowRankOfRows: up to so many rows take the exact road
};

// U is orthonormal, V carries the singular values: row k of vt has norm σ_k, and these
// descend. rank 0 is the zero matrix.
template <typename T>
struct Factors {
  int rank = 0;
  int64_t m = 0;
  int64_t n = 0;       // with the bias column, if there is one
  bool finite = true;  // false: the input had infinities or NaN; rank is 0 then
  std::vector<T> ut;   // rank×m
  std::vector<T> vt;   // rank×n

  MatrixView<const T> Ut() const { return {ut.data(), rank, m, m}; }
  MatrixView<const T> Vt() const { return {vt.data(), rank, n, n}; }
};

// From P = E V (r×m here, one direction per row) and Q = Eᵀ P (r×n) to factors of E:
// orthonormalises P, dropping directions that are numerically zero, takes Q along,
// turns both to the singular directions and cuts by rank, tol and energy.
// `total_energy` is ‖E‖², negative if not known: then what P spans stands for all.
//
// `next_v`, unless it has no rows, gets the start of the next step: r×n, all directions
// found with norm 1, those that are not sent too, and random ones in place of the dropped.
template <typename T>
Factors<T> FinishSubspace(CpuLevel level, ConstMatrix<T> p, MatrixView<const T> q,
                          const LowRankOptions& options, double total_energy,
                          std::type_identity_t<MatrixView<T>> next_v = {});

// Factors of G = Σ over terms of scale dᵀ a (m×n, at rows out_begin), which is never
// formed. With `bias`, a column of ones is appended to each a, and vt has n + 1 columns.
// Few rows (options.exact_rows, and less than min(m, n)): exact, by thin QR of A and D and
// the SVD of the small core. Else `iterations` of block subspace iteration through
// Dᵀ(A x), starting at `v_warm` (r×n or r×(n+1)) or, if that has no rows, at random.
//
// Also serves a sum of factors, with d = ut, a = vt, n columns in all and no bias.
template <typename T>
Factors<T> LowRankOfRows(CpuLevel level, std::span<const RowsTerm<T>> rows, int64_t m, int64_t n,
                         bool bias, std::type_identity_t<MatrixView<const T>> v_warm,
                         const LowRankOptions& options,
                         std::type_identity_t<MatrixView<T>> next_v = {});

// ‖G‖² for the same G: Σ (A Aᵀ)∘(D Dᵀ). In double.
template <typename T>
double EnergyOfRows(CpuLevel level, std::span<const RowsTerm<T>> rows, int64_t m, int64_t n,
                    bool bias);

// Rows of pseudo-random values, of norm about 1: a function of the seed and the sizes, the
// same bits everywhere.
template <typename T>
void RandomStart(uint64_t seed, MatrixView<T> v_warm);
// Its values are from -1 to 1, times this.
double RandomScale(int64_t cols);
// Where the random directions begin that stand in for missing ones: a seed for each.
inline constexpr uint64_t kRefillSeed = 0x6c6f775f72616e6bu;

}  // namespace dad
