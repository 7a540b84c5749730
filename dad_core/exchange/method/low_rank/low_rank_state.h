// One side of error feedback for a layer: a residual E, and the best r directions of what has
// gathered in it. rank_dad has it twice: on every rank for what it sends to the owner, and on
// the owner for what it sends to all.
//
//   E += terms;   C = wire(top_r(E));   E -= C
//
// E is large and C small, so C is not subtracted at once but together with the next terms:
// one pass over E per step (linalg/residual.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "codec/factor_wire.h"
#include "dad/state.h"
#include "linalg/low_rank.h"
#include "linalg/residual.h"
#include "util/aligned_buffer.h"

namespace dad {

// What a gradient is the sum of.
template <typename T>
struct Terms {
  std::vector<RowsTerm<T>> rows;
  std::vector<FactorTerm<T>> factors;
  std::vector<IndexedTerm<T>> indexed;
  std::vector<DenseTerm<T>> dense;
};

// Directions as they were sent: what receivers decode.
template <typename T>
struct SentFactors {
  int64_t k = 0;
  std::vector<T> ut;  // k×m
  std::vector<T> vt;  // k×n, with the bias column if there is one

  MatrixView<const T> Ut(int64_t m) const { return ViewOf(ut.data(), k, m); }
  MatrixView<const T> Vt(int64_t n) const { return ViewOf(vt.data(), k, n); }
};

enum class Feedback { kNone, kDense, kRows };

template <typename T>
class LowRankSide {
 public:
  // `columns` counts the bias.
  LowRankSide(int64_t m, int64_t columns, bool bias, uint64_t seed);

  // The directions of residual + terms, rounded to the wire: `bytes` is their encoding, of
  // EncodedBytes for ut and for vt in turn. What is returned leaves the residual.
  SentFactors<T> Compress(CpuLevel level, const Terms<T>& terms, Feedback feedback,
                          const LowRankOptions& options, Wire wire, std::vector<std::byte>& bytes);

  // The residual as it is after `terms`, for the power iteration: P = E V of all directions.
  void AddAndProject(CpuLevel level, const Terms<T>& terms, int rank, MatrixView<T> p);
  // Q = Eᵀ U for orthonormal u: r×m.
  void ProjectBack(CpuLevel level, MatrixView<const T> u, MatrixView<T> q) const;
  // What was applied in the end leaves the residual; the start of the next iteration.
  void Subtract(SentFactors<T> applied, MatrixView<const T> next_start);

  // Takes the last step back: neither its terms nor what was sent has happened.
  void Undo(CpuLevel level, const Terms<T>& terms);
  // What was sent last returns to the residual.
  void ReturnSent(CpuLevel level);
  // A step begins: what was sent before it has been applied.
  void ForgetSent() { last_.k = 0; }

  bool empty() const { return residual_.size() == 0; }
  // E as a term of another side, and the end of it here.
  DenseTerm<T> AsTerm(CpuLevel level, T scale);
  void Clear();

  void Export(const std::string& prefix, std::vector<StateTensor>& out) const;
  Status Import(const std::string& prefix, const std::vector<StateTensor>& tensors);

  // The part of ‖E‖² that Compress() takes out of a dense residual: the mean of measurements, of
  // which each counts half as much as the next one; negative: there was none. With what a step
  // adds, E is all that waits to be sent.
  double captured() const { return captured_; }

  int64_t m() const { return m_; }
  int64_t columns() const { return columns_; }

 private:
  MatrixView<T> E();
  T* EBias();
  void EnsureResidual();
  MatrixView<T> Warm(int rank);
  void Settle(CpuLevel level);  // subtracts what is pending
  Factors<T> Iterate(CpuLevel level, const Terms<T>& terms, const LowRankOptions& options);
  Factors<T> ReduceRows(CpuLevel level, const Terms<T>& terms, Feedback feedback,
                        const LowRankOptions& options);
  void KeepRows(CpuLevel level, const Terms<T>& terms, const LowRankOptions& options);

  const int64_t m_;
  const int64_t columns_;
  const bool bias_;
  const uint64_t seed_;
  AlignedBuffer residual_;  // m×n, then the bias column; empty until needed
  std::vector<T> warm_;     // r×columns
  int warm_rank_ = 0;
  bool is_warm_ = false;
  std::vector<T> previous_warm_;  // before the last step, for Undo
  SentFactors<T> pending_;        // to be subtracted with the next terms
  SentFactors<T> last_;           // what was sent last
  bool last_is_pending_ = false;
  int64_t num_iterates_ = 0;
  double captured_ = -1.0;
  SentFactors<T> rows_;           // Feedback::kRows: the residual as rows
  SentFactors<T> previous_rows_;  // for Undo
};

}  // namespace dad
