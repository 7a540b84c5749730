#include "exchange/method/low_rank/low_rank_state.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "exchange/by_method.h"
#include "linalg/kernels.h"
#include "linalg/products.h"

namespace dad {
namespace {

// Passes over E to find directions from nothing; after that one per step keeps up.
constexpr int kColdIterations = 6;
// Feedback::kRows keeps this many rows for each direction that is sent.
constexpr int kRowsPerDirection = 4;
// What a step captures changes slowly, and measuring it reads all of E.
constexpr int kMeasureEvery = 16;

template <typename T>
StateTensor Copy(std::string name, Shape shape, const T* data) {
  StateTensor tensor{std::move(name), DTypeOf<T>(), std::move(shape), {}};
  tensor.bytes.resize(static_cast<size_t>(NumElements(tensor.shape)) * sizeof(T));
  if (!tensor.bytes.empty()) std::memcpy(tensor.bytes.data(), data, tensor.bytes.size());
  return tensor;
}

}  // namespace

template <typename T>
LowRankSide<T>::LowRankSide(int64_t m, int64_t columns, bool bias, uint64_t seed)
    : m_(m), columns_(columns), bias_(bias), seed_(seed) {}

template <typename T>
MatrixView<T> LowRankSide<T>::E() {
  const int64_t n = columns_ - (bias_ ? 1 : 0);
  return ViewOf(reinterpret_cast<T*>(residual_.data()), m_, n);
}

template <typename T>
T* LowRankSide<T>::EBias() {
  return bias_ ? reinterpret_cast<T*>(residual_.data()) + m_ * (columns_ - 1) : nullptr;
}

template <typename T>
void LowRankSide<T>::EnsureResidual() {
  if (residual_.size() > 0 || m_ * columns_ == 0) return;
  residual_ = AlignedBuffer(static_cast<size_t>(m_ * columns_) * sizeof(T));
  std::memset(residual_.data(), 0, residual_.size());
}

template <typename T>
MatrixView<T> LowRankSide<T>::Warm(int rank) {
  if (warm_rank_ != rank) {
    warm_.assign(static_cast<size_t>(rank * columns_), T(0));
    warm_rank_ = rank;
    is_warm_ = false;
  }
  const MatrixView<T> warm = ViewOf(warm_.data(), rank, columns_);
  if (!is_warm_) RandomStart<T>(seed_, warm);
  return warm;
}

template <typename T>
void LowRankSide<T>::Settle(CpuLevel level) {
  if (pending_.k == 0) return;
  EnsureResidual();
  const FactorTerm<T> sent{pending_.Ut(m_), pending_.Vt(columns_), T(-1)};
  ResidualStep<T> step;
  step.e = E();
  step.e_bias = EBias();
  step.factors = {&sent, 1};
  RunResidualStep(level, step);
  pending_.k = 0;
  last_is_pending_ = false;
}

// E += terms, and the directions of the sum.
template <typename T>
Factors<T> LowRankSide<T>::Iterate(CpuLevel level, const Terms<T>& terms,
                                   const LowRankOptions& options) {
  EnsureResidual();
  std::vector<FactorTerm<T>> factors = terms.factors;
  if (pending_.k > 0) factors.push_back({pending_.Ut(m_), pending_.Vt(columns_), T(-1)});
  const MatrixView<T> warm = Warm(options.rank);
  previous_warm_ = is_warm_ ? warm_ : std::vector<T>();
  std::vector<T> p(static_cast<size_t>(options.rank * m_));
  std::vector<T> q(static_cast<size_t>(options.rank * columns_));
  const bool measures = num_iterates_++ % kMeasureEvery == 0;
  double energy = -1.0;
  ResidualStep<T> step;
  step.e = E();
  step.e_bias = EBias();
  step.rows = terms.rows;
  step.factors = factors;
  step.indexed = terms.indexed;
  step.dense = terms.dense;
  step.v_warm = warm;
  step.p = ViewOf(p.data(), options.rank, m_);
  step.q = ViewOf(q.data(), options.rank, columns_);
  if (options.energy > 0 || measures) step.energy = &energy;
  Factors<T> found;
  const int passes = options.iterations + (is_warm_ ? 0 : kColdIterations);
  for (int pass = 0; pass < passes; ++pass) {
    RunResidualStep(level, step);
    step.rows = {};
    step.factors = {};
    step.indexed = {};
    step.dense = {};
    step.energy = nullptr;
    found =
        FinishSubspace<T>(level, step.p, step.q, options, options.energy > 0 ? energy : -1.0, warm);
  }
  if (measures && found.finite) {
    const double sent = linalg::KernelsAt<T>(level).sum_squares(
        found.vt.data(), static_cast<int64_t>(found.vt.size()));
    const double part = energy > 0 ? std::min(1.0, sent / energy) : 1.0;
    captured_ = captured_ < 0 ? part : (captured_ + part) / 2;
  }
  pending_.k = 0;
  is_warm_ = found.finite && found.rank > 0;
  return found;
}

// Without a residual, or with one that is kept as rows: G is never formed, unless it came
// formed already.
template <typename T>
Factors<T> LowRankSide<T>::ReduceRows(CpuLevel level, const Terms<T>& terms, Feedback feedback,
                                      const LowRankOptions& options) {
  if (!terms.dense.empty() || !terms.indexed.empty() ||
      (!terms.rows.empty() && !terms.factors.empty())) {
    LowRankSide<T> scratch(m_, columns_, bias_, seed_);
    scratch.warm_ = warm_;
    scratch.warm_rank_ = warm_rank_;
    scratch.is_warm_ = is_warm_;
    Factors<T> found = scratch.Iterate(level, terms, options);
    warm_ = std::move(scratch.warm_);
    warm_rank_ = scratch.warm_rank_;
    is_warm_ = scratch.is_warm_;
    return found;
  }
  const MatrixView<T> warm = Warm(options.rank);
  previous_warm_ = is_warm_ ? warm_ : std::vector<T>();
  LowRankOptions first = options;
  if (!is_warm_) first.iterations += kColdIterations;
  const std::vector<T> start = warm_;
  const MatrixView<const T> v = ViewOf(start.data(), options.rank, columns_);
  Factors<T> found;
  if (terms.factors.empty() && feedback == Feedback::kNone) {
    found =
        LowRankOfRows<T>(level, terms.rows, m_, columns_ - (bias_ ? 1 : 0), bias_, v, first, warm);
  } else {
    std::vector<RowsTerm<T>> all;
    for (const FactorTerm<T>& term : terms.factors)
      all.push_back({term.ut, term.vt, term.scale, 0});
    found = LowRankOfRows<T>(level, all, m_, columns_, false, v, first, warm);
  }
  is_warm_ = found.finite && found.rank > 0;
  return found;
}

template <typename T>
SentFactors<T> LowRankSide<T>::Compress(CpuLevel level, const Terms<T>& terms, Feedback feedback,
                                        const LowRankOptions& options, Wire wire,
                                        std::vector<std::byte>& bytes) {
  Terms<T> with_kept;
  std::vector<std::vector<T>> with_ones;
  const Terms<T>* all = &terms;
  if (feedback == Feedback::kRows) {
    // The bias becomes a column like the others: rows that are kept have one.
    with_kept.factors = terms.factors;
    for (const RowsTerm<T>& rows : terms.rows) {
      if (!bias_) {
        with_kept.factors.push_back({rows.d, rows.a, rows.scale});
        continue;
      }
      std::vector<T>& a = with_ones.emplace_back(static_cast<size_t>(rows.a.rows * columns_));
      for (int64_t i = 0; i < rows.a.rows; ++i) {
        std::copy_n(rows.a.row(i), columns_ - 1, a.data() + i * columns_);
        a[static_cast<size_t>((i + 1) * columns_ - 1)] = T(1);
      }
      with_kept.factors.push_back(
          {rows.d, ViewOf<const T>(a.data(), rows.a.rows, columns_), rows.scale});
    }
    if (rows_.k > 0) with_kept.factors.push_back({rows_.Ut(m_), rows_.Vt(columns_), T(1)});
    all = &with_kept;
  }
  Factors<T> found = feedback == Feedback::kDense ? Iterate(level, terms, options)
                                                  : ReduceRows(level, *all, feedback, options);
  SentFactors<T> sent;
  sent.k = found.rank;
  sent.ut = std::move(found.ut);
  sent.vt = std::move(found.vt);
  const size_t u_bytes = EncodedBytes(wire, sent.k, m_, DTypeOf<T>());
  const size_t v_bytes = EncodedBytes(wire, sent.k, columns_, DTypeOf<T>());
  bytes.resize(u_bytes + v_bytes);
  const MatrixView<T> ut = ViewOf(sent.ut.data(), sent.k, m_);
  const MatrixView<T> vt = ViewOf(sent.vt.data(), sent.k, columns_);
  EncodeFactors<T>(wire, ut, std::span(bytes).first(u_bytes), ut);
  EncodeFactors<T>(wire, vt, std::span(bytes).subspan(u_bytes), vt);
  if (feedback == Feedback::kDense) {
    pending_ = sent;
  } else if (feedback == Feedback::kRows) {
    with_kept.factors.push_back({sent.Ut(m_), sent.Vt(columns_), T(-1)});
    KeepRows(level, with_kept, options);
  }
  last_ = feedback == Feedback::kNone ? SentFactors<T>() : sent;
  last_is_pending_ = feedback == Feedback::kDense;
  return sent;
}

template <typename T>
void LowRankSide<T>::KeepRows(CpuLevel level, const Terms<T>& terms,
                              const LowRankOptions& options) {
  std::vector<RowsTerm<T>> all;
  int64_t num_rows = 0;
  for (const FactorTerm<T>& term : terms.factors) {
    all.push_back({term.ut, term.vt, term.scale, 0});
    num_rows += term.ut.rows;
  }
  LowRankOptions keep;
  keep.rank = kRowsPerDirection * options.rank;
  keep.iterations = kColdIterations;
  keep.exact_rows = static_cast<int>(std::min<int64_t>(num_rows, 256));
  Factors<T> kept = LowRankOfRows<T>(level, all, m_, columns_, false, {}, keep);
  previous_rows_ = std::move(rows_);
  rows_ = {kept.rank, std::move(kept.ut), std::move(kept.vt)};
}

template <typename T>
void LowRankSide<T>::AddAndProject(CpuLevel level, const Terms<T>& terms, int rank,
                                   MatrixView<T> p) {
  EnsureResidual();
  std::vector<FactorTerm<T>> factors = terms.factors;
  if (pending_.k > 0) factors.push_back({pending_.Ut(m_), pending_.Vt(columns_), T(-1)});
  std::vector<T> q(static_cast<size_t>(rank * columns_));
  ResidualStep<T> step;
  step.e = E();
  step.e_bias = EBias();
  step.rows = terms.rows;
  step.factors = factors;
  step.indexed = terms.indexed;
  step.dense = terms.dense;
  step.v_warm = Warm(rank);
  step.p = p;
  step.q = ViewOf(q.data(), rank, columns_);
  previous_warm_ = is_warm_ ? warm_ : std::vector<T>();
  RunResidualStep(level, step);
  pending_.k = 0;
}

template <typename T>
void LowRankSide<T>::ProjectBack(CpuLevel level, MatrixView<const T> u, MatrixView<T> q) const {
  auto* self = const_cast<LowRankSide*>(this);
  const MatrixView<T> e = self->E();
  Multiply<T>(level, u, e, q.Cols(0, e.cols));
  if (!bias_) return;
  const T* bias = self->EBias();
  for (int64_t k = 0; k < u.rows; ++k) {
    T sum = 0;
    for (int64_t i = 0; i < m_; ++i) sum += u.row(k)[i] * bias[i];
    q.row(k)[columns_ - 1] = sum;
  }
}

template <typename T>
void LowRankSide<T>::Subtract(SentFactors<T> applied, MatrixView<const T> next_start) {
  pending_ = applied;
  last_ = std::move(applied);
  last_is_pending_ = true;
  for (int64_t k = 0; k < next_start.rows; ++k) {
    std::copy_n(next_start.row(k), columns_, warm_.data() + k * columns_);
  }
  is_warm_ = next_start.rows > 0;
}

template <typename T>
void LowRankSide<T>::Undo(CpuLevel level, const Terms<T>& terms) {
  pending_.k = 0;
  last_.k = 0;
  if (rows_.k > 0 || previous_rows_.k > 0) rows_ = std::move(previous_rows_);
  is_warm_ = !previous_warm_.empty();
  if (is_warm_) warm_ = previous_warm_;
  if (empty()) return;
  Terms<T> negative = terms;
  for (auto& term : negative.rows) term.scale = -term.scale;
  for (auto& term : negative.factors) term.scale = -term.scale;
  for (auto& term : negative.indexed) term.scale = -term.scale;
  for (auto& term : negative.dense) term.scale = -term.scale;
  ResidualStep<T> step;
  step.e = E();
  step.e_bias = EBias();
  step.rows = negative.rows;
  step.factors = negative.factors;
  step.indexed = negative.indexed;
  step.dense = negative.dense;
  RunResidualStep(level, step);
}

template <typename T>
void LowRankSide<T>::ReturnSent(CpuLevel level) {
  if (last_.k == 0) return;
  if (last_is_pending_) {
    pending_.k = 0;  // it has not left yet
  } else if (!empty()) {
    const FactorTerm<T> sent{last_.Ut(m_), last_.Vt(columns_), T(1)};
    ResidualStep<T> step;
    step.e = E();
    step.e_bias = EBias();
    step.factors = {&sent, 1};
    RunResidualStep(level, step);
  } else if (last_.k > 0) {  // kept as rows
    rows_.ut.insert(rows_.ut.end(), last_.ut.begin(), last_.ut.end());
    rows_.vt.insert(rows_.vt.end(), last_.vt.begin(), last_.vt.end());
    rows_.k += last_.k;
  }
  last_.k = 0;
}

template <typename T>
DenseTerm<T> LowRankSide<T>::AsTerm(CpuLevel level, T scale) {
  Settle(level);
  return {E(), EBias(), scale};
}

template <typename T>
void LowRankSide<T>::Clear() {
  residual_ = AlignedBuffer();
  warm_rank_ = 0;
  is_warm_ = false;
  pending_ = last_ = rows_ = {};
}

// What is pending stays so: (E + G) - C and (E - C) + G differ in the last bit, and a run that
// is resumed must be the run that went on.
template <typename T>
void LowRankSide<T>::Export(const std::string& prefix, std::vector<StateTensor>& out) const {
  if (!empty()) {
    out.push_back(Copy<T>(prefix + "residual", {m_ * columns_},
                          reinterpret_cast<const T*>(residual_.data())));
  }
  if (is_warm_) out.push_back(Copy<T>(prefix + "warm_start", {warm_rank_, columns_}, warm_.data()));
  auto both = [&](const std::string& name, const SentFactors<T>& factors) {
    if (factors.k == 0) return;
    out.push_back(Copy<T>(prefix + name + "_d", {factors.k, m_}, factors.ut.data()));
    out.push_back(Copy<T>(prefix + name + "_a", {factors.k, columns_}, factors.vt.data()));
  };
  both("pending", pending_);
  both("rows", rows_);
}

template <typename T>
Status LowRankSide<T>::Import(const std::string& prefix, const std::vector<StateTensor>& tensors) {
  for (const StateTensor& tensor : tensors) {
    if (tensor.name.rfind(prefix, 0) != 0) continue;
    const std::string name = tensor.name.substr(prefix.size());
    const int64_t count = NumElements(tensor.shape);
    const int64_t k = tensor.shape.empty() ? 0 : tensor.shape[0];
    const int64_t expected = name == "residual"     ? m_ * columns_
                             : name.ends_with("_d") ? k * m_
                                                    : k * columns_;
    if (tensor.dtype != DTypeOf<T>() || count != expected ||
        tensor.bytes.size() != static_cast<size_t>(count) * sizeof(T)) {
      return Status::InvalidArgument("a saved " + tensor.name + " of shape " +
                                     ToString(tensor.shape) + " and type " + Name(tensor.dtype) +
                                     " does not fit a layer of " + std::to_string(m_) + " x " +
                                     std::to_string(columns_));
    }
    const auto* values = reinterpret_cast<const T*>(tensor.bytes.data());
    if (name == "residual") {
      EnsureResidual();
      if (count > 0) std::memcpy(residual_.data(), values, tensor.bytes.size());
    } else if (name == "warm_start") {
      warm_.assign(values, values + count);
      warm_rank_ = static_cast<int>(k);
      is_warm_ = k > 0;
    } else {
      SentFactors<T>& factors = name.starts_with("rows") ? rows_ : pending_;
      factors.k = k;
      (name.ends_with("_d") ? factors.ut : factors.vt).assign(values, values + count);
    }
  }
  for (const SentFactors<T>* factors : {&rows_, &pending_}) {
    if (factors->ut.size() != static_cast<size_t>(factors->k * m_) ||
        factors->vt.size() != static_cast<size_t>(factors->k * columns_)) {
      return Status::InvalidArgument("a saved state has one factor without the other");
    }
  }
  return Status::Ok();
}

template class LowRankSide<float>;
template class LowRankSide<double>;

}  // namespace dad
