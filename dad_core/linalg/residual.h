// The step of error feedback: everything that has to happen to a layer's residual E
// (m×n, often larger than the caches) in one read and one write of it.
//
//   E += all terms        the new gradient, minus what was sent last time
//   P  = E V              V: the directions found last time
//   Q  = Eᵀ P
//
// Orthogonalising P comes afterwards and needs no further pass: with P = U R,
// Eᵀ U = Q R⁻¹ (low_rank.h). A bias is a column of E that lies elsewhere (`e_bias`); it
// takes part in everything.
#pragma once

#include <cstdint>
#include <span>

#include "linalg/cpu_level.h"
#include "linalg/matrix.h"

namespace dad {

// E[out_begin .. out_begin + d.cols) += scale dᵀ a, for d: k×(at most m), a: k×n. The
// bias gets the column sums of d, as if a had a column of ones.
template <typename T>
struct RowsTerm {
  MatrixView<const T> d;
  MatrixView<const T> a;
  T scale = 1;
  int64_t out_begin = 0;
};

// E += scale Σ_k ut[k]ᵀ vt[k], for ut: k×m, vt: k×n, with a bias k×(n+1).
template <typename T>
struct FactorTerm {
  MatrixView<const T> ut;
  MatrixView<const T> vt;
  T scale = 1;
};

// E[index[k]] += scale x[k], for x: k×n: the gradient of an embedding. Each index is in
// [0, m), which is for the caller to check; one may come several times.
template <typename T>
struct IndexedTerm {
  const int64_t* index = nullptr;
  MatrixView<const T> x;
  T scale = 1;
};

// E += scale g; e_bias += scale g_bias, unless that is null.
template <typename T>
struct DenseTerm {
  MatrixView<const T> g;
  const T* g_bias = nullptr;
  T scale = 1;
};

template <typename T>
struct ResidualStep {
  MatrixView<T> e;      // m×n
  T* e_bias = nullptr;  // m elements; null: no bias
  std::span<const RowsTerm<T>> rows;
  std::span<const FactorTerm<T>> factors;
  std::span<const IndexedTerm<T>> indexed;
  std::span<const DenseTerm<T>> dense;
  MatrixView<const T> v_warm;  // r×n, with a bias r×(n+1); no rows: P and Q are not wanted
  MatrixView<T> p;             // r×m
  MatrixView<T> q;             // as v_warm, which it must not overlap
  double* energy = nullptr;    // if not null: Σ E² after the terms, with the bias
};

// Without terms, E is only read. The same inputs at the same level give the same bits.
template <typename T>
void RunResidualStep(CpuLevel level, const ResidualStep<T>& step);

}  // namespace dad
