#include "exchange/method/low_rank/low_rank.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <vector>

#include "exchange/by_method.h"
#include "exchange/feedback/state_store.h"
#include "exchange/layer/layer_result.h"
#include "exchange/method/low_rank/low_rank_share.h"
#include "exchange/method/low_rank/low_rank_state.h"
#include "exchange/method/low_rank/power_share.h"
#include "exchange/share/share_io.h"
#include "exchange/share/shares.h"
#include "linalg/products.h"

namespace dad {
namespace {

// Largest magnitude; infinity if one is not finite.
template <typename T>
double MaxAbs(MatrixView<const T> x) {
  T largest = 0;
  T poison = 0;  // 0, or NaN as soon as one value is not finite
  for (int64_t i = 0; i < x.rows; ++i) {
    const T* row = x.row(i);
    for (int64_t j = 0; j < x.cols; ++j) {
      const T magnitude = std::fabs(row[j]);
      largest = magnitude > largest ? magnitude : largest;
      poison += row[j] * T(0);
    }
  }
  return poison == T(0) ? static_cast<double>(largest) : std::numeric_limits<double>::infinity();
}

// What one rank keeps for one layer.
template <typename T>
class LowRankState final : public ExchangeState {
 public:
  LowRankState(const LowRankSettings& settings, CpuLevel level)
      : rank(settings.layer.out, settings.columns(), settings.layer.bias, LowRankSeed(settings, 1)),
        owner(settings.layer.out, settings.columns(), settings.layer.bias,
              LowRankSeed(settings, 2)),
        level_(level) {}

  void Export(std::vector<StateTensor>& out) override {
    rank.Export("rank_", out);
    owner.Export("owner_", out);
  }
  Status Import(const std::vector<StateTensor>& tensors) override {
    DAD_RETURN_IF_ERROR(rank.Import("rank_", tensors));
    return owner.Import("owner_", tensors);
  }
  void ReturnLast() override {
    // What was applied came from the owner's residual; without an owner from everybody's.
    (last_by_owner ? owner : rank).ReturnSent(level_);
  }

  LowRankSide<T> rank;
  LowRankSide<T> owner;
  bool last_by_owner = true;
  // State of a step that has begun and may be begun again.
  uint64_t submit_id = 0;
  bool finite = true;
  SentFactors<T> sent;
  std::vector<std::byte> bytes;

 private:
  const CpuLevel level_;
};

template <typename T>
class LowRankExchange final : public Exchange {
 public:
  LowRankExchange(const TensorSpec& spec, const LowRankSettings& settings, const ExchangeEnv& env)
      : spec_(spec), settings_(settings), env_(env) {}

  // What was begun is found again by its submit_id. An error comes again, where it is heard.
  void Prepare(const StepInput& input, const Group& group) override { (void)Begin(input, group); }

  Status Begin(const StepInput& input, const Group& group) override {
    group_ = group;
    step_ = input;
    result_ = {};
    any_not_finite_ = any_replan_ = false;
    not_finite_rank_ = -1;
    // Asked for in every step: a checkpoint may have put another in its place.
    DAD_RETURN_IF_ERROR(FindState());
    state_->last_by_owner = settings_.combine == LowRankCombine::kOwner;
    const bool again = input.mine != nullptr && state_->submit_id == input.submit_id;
    if (!again) {
      state_->rank.ForgetSent();
      state_->owner.ForgetSent();
    }
    if (input.mine == nullptr) return Status::Ok();
    if (input.mine->layers.size() != 1) {
      return Status::InvalidArgument("\"" + spec_.name + "\": expected one layer, got " +
                                     std::to_string(input.mine->layers.size()));
    }
    terms_ = CollectTerms();
    if (again) return Status::Ok();  // prepared, or begun once and cancelled
    state_->submit_id = input.submit_id;
    state_->finite = Finite();
    if (!state_->finite) {
      state_->sent = {};
      state_->bytes.clear();
      return Status::Ok();
    }
    const bool moved = !IsOwner() && !state_->owner.empty();
    if (moved) {
      // A new plan has given the layer to another owner: what is left here goes the way of
      // this rank's own gradients, where it counts 1/W.
      terms_.dense.push_back(state_->owner.AsTerm(env_.cpu_level, static_cast<T>(group_.size)));
    }
    if (settings_.combine == LowRankCombine::kPower) {
      state_->sent.k = settings_.options.rank;
      state_->sent.ut.assign(static_cast<size_t>(state_->sent.k * m()), T(0));
      state_->rank.AddAndProject(env_.cpu_level, terms_, settings_.options.rank,
                                 ViewOf(state_->sent.ut.data(), state_->sent.k, m()));
    } else {
      state_->sent = state_->rank.Compress(env_.cpu_level, terms_, settings_.feedback,
                                           settings_.options, settings_.wire, state_->bytes);
    }
    if (moved) {
      terms_.dense.pop_back();
      state_->owner.Clear();
    }
    return Status::Ok();
  }

  int num_rounds() const override {
    switch (settings_.combine) {
      case LowRankCombine::kGather: return 1;
      case LowRankCombine::kOwner: return 2;
      case LowRankCombine::kPower: return 4;
    }
    return 1;
  }

  // Even rounds go to the owner, odd ones come from it; gather goes from all to all.
  bool SendsLength(int round, int peer) const override { return Travels(round, group_.rank, peer); }
  int64_t ReceiveBytes(int round, int peer) const override {
    return Travels(round, peer, group_.rank) ? -1 : 0;
  }

  Status Send(int round, int peer, GatherBuffer& out) override {
    if (!Travels(round, group_.rank, peer)) return Status::Ok();
    if (round % 2 == 1) {
      out.Reference(from_owner_.data(), from_owner_.size());
      return Status::Ok();
    }
    const bool finite = state_->finite;
    out.AppendValue(static_cast<uint8_t>((finite ? 0 : kLowRankNotFinite) |
                                         (step_.mine->replan ? kLowRankReplan : 0)));
    if (!finite) return Status::Ok();
    if (settings_.combine == LowRankCombine::kPower) {
      AppendMatrix(round == 0 ? state_->sent.ut : state_->sent.vt, out);
    } else {
      out.AppendValue(static_cast<uint8_t>(state_->sent.k));
      out.Reference(state_->bytes.data(), state_->bytes.size());
    }
    return Status::Ok();
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r != group_.rank && ReceiveBytes(round, r) == 0) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[static_cast<size_t>(r)], 0));
      }
    }
    if (settings_.combine == LowRankCombine::kPower) return ReceivePower(round, shares);
    if (round == 1) return IsOwner() ? Status::Ok() : TakeResult(OwnersShare(shares));
    if (settings_.combine == LowRankCombine::kOwner && !IsOwner()) return Status::Ok();
    std::vector<SentFactors<T>> all(static_cast<size_t>(group_.size));
    for (int r = 0; r < group_.size; ++r) {
      const size_t i = static_cast<size_t>(r);
      if (group_.Joined(r)) continue;
      if (r == group_.rank) {
        Note(r, state_->finite, step_.mine->replan);
        if (state_->finite) all[i] = state_->sent;
      } else if (Travels(round, r, group_.rank)) {
        DAD_RETURN_IF_ERROR(ParseFactors(r, shares[i], all[i]));
      }
    }
    if (settings_.combine == LowRankCombine::kGather) {
      result_ = Stacked(all);
      return Status::Ok();
    }
    ReduceAsOwner(all);
    return Status::Ok();
  }

  Status Finish() override {
    if (step_.mine == nullptr) return Status::Ok();
    if (step_.report != nullptr) {
      step_.report->replan = any_replan_;
      step_.report->not_finite = any_not_finite_;
      step_.report->not_finite_rank = state_->finite ? not_finite_rank_ : group_.rank;
      step_.report->effective = static_cast<double>(result_.k);
      step_.report->captured = Captured();
    }
    // This rank was fine, another was not: as if the step had not been.
    if (any_not_finite_ && state_->finite) state_->rank.Undo(env_.cpu_level, terms_);
    state_->submit_id = 0;
    WriteOutput();
    return Status::Ok();
  }

 private:
  int64_t m() const { return settings_.layer.out; }
  int64_t columns() const { return settings_.columns(); }
  bool IsOwner() const { return group_.rank == settings_.owner; }

  // The owner compresses a second time, and only it knows how well.
  double Captured() const {
    const double mine = state_->rank.captured();
    return mine >= 0 && state_->owner.captured() >= 0 ? mine * state_->owner.captured() : mine;
  }

  bool Travels(int round, int from, int to) const {
    if (from == to) return false;
    if (settings_.combine == LowRankCombine::kGather)
      return !group_.Joined(from) && !group_.Joined(to);
    if (round % 2 == 0) return to == settings_.owner && !group_.Joined(from);
    return from == settings_.owner && !group_.Joined(to);
  }

  Status FindState() {
    auto make = [&] { return std::make_shared<LowRankState<T>>(settings_, env_.cpu_level); };
    auto found = StateOf<LowRankState<T>>(spec_, env_, make);
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    if (state_->rank.m() == m() && state_->rank.columns() == columns()) return Status::Ok();
    return Status::InvalidArgument("\"" + spec_.name + "\": its shape has changed");
  }

  int NumActive() const {
    int count = 0;
    for (int r = 0; r < group_.size; ++r) count += group_.Joined(r) ? 0 : 1;
    return count;
  }

  // ---- this rank's gradient

  MatrixView<const T> AsMatrix(const TensorView& values, int64_t rows, int64_t cols) {
    if (values.dtype == DTypeOf<T>()) {
      return ViewOf(static_cast<const T*>(values.data), rows, cols);
    }
    std::vector<T>& wide = converted_.emplace_back(static_cast<size_t>(rows * cols));
    ConvertTo(values, wide.data());
    return ViewOf<const T>(wide.data(), rows, cols);
  }

  Terms<T> CollectTerms() {
    converted_.clear();
    const LayerInput& layer = step_.mine->layers[0];
    const T scale = static_cast<T>(step_.mine->scale * spec_.prescale);
    Terms<T> terms;
    for (const RowsSegment& segment : layer.rows) {
      const int64_t rows = segment.a.shape[0];
      terms.rows.push_back({AsMatrix(segment.d, rows, segment.d.shape[1]),
                            AsMatrix(segment.a, rows, settings_.layer.in), scale,
                            segment.d.shape[1] == m() ? 0 : segment.out_begin});
    }
    for (const IndexedSegment& segment : layer.indexed) {
      const int64_t rows = segment.index.num_elements();
      terms.indexed.push_back({static_cast<const int64_t*>(segment.index.data),
                               AsMatrix(segment.x, rows, settings_.layer.in), scale});
    }
    if (layer.dense.data != nullptr) {
      const T* bias =
          layer.dense_bias.data == nullptr ? nullptr : AsMatrix(layer.dense_bias, 1, m()).data;
      terms.dense.push_back({AsMatrix(layer.dense, m(), settings_.layer.in), bias, scale});
    }
    return terms;
  }

  // Also when the products cannot overflow: what enters a residual never leaves it.
  bool Finite() const {
    constexpr double kLimit = sizeof(T) == 8 ? 1e300 : 1e36;
    double bound = 0;
    for (const RowsTerm<T>& term : terms_.rows) {
      bound += MaxAbs(term.d) * std::max(1.0, MaxAbs(term.a)) * static_cast<double>(term.d.rows);
    }
    for (const IndexedTerm<T>& term : terms_.indexed) {
      bound += MaxAbs(term.x) * static_cast<double>(term.x.rows);
    }
    for (const DenseTerm<T>& term : terms_.dense) {
      bound += MaxAbs(term.g);
      if (term.g_bias != nullptr) bound += MaxAbs(ViewOf(term.g_bias, 1, m()));
    }
    return bound * std::fabs(step_.mine->scale * spec_.prescale) < kLimit;
  }

  // ---- factors on the wire

  // What `rank` said of itself; -1: what the owner says of all.
  void Note(int rank, bool finite, bool replan) {
    if (!finite && not_finite_rank_ < 0) not_finite_rank_ = rank;
    any_not_finite_ = any_not_finite_ || !finite;
    any_replan_ = any_replan_ || replan;
  }

  Status ParseFactors(int rank, ByteSpan share, SentFactors<T>& factors) {
    uint8_t flags = 0;
    DAD_RETURN_IF_ERROR(ReadLowRankShare<T>(spec_, settings_, rank, share, flags, factors));
    Note(rank, (flags & kLowRankNotFinite) == 0, (flags & kLowRankReplan) != 0);
    return Status::Ok();
  }

  ByteSpan OwnersShare(std::span<const ByteSpan> shares) const {
    return shares[static_cast<size_t>(settings_.owner)];
  }

  // What came from the owner, for all but the owner.
  Status TakeResult(ByteSpan share) {
    if (step_.mine == nullptr) return Status::Ok();
    DAD_RETURN_IF_ERROR(ParseFactors(settings_.owner, share, result_));
    not_finite_rank_ = -1;  // the owner has told that somebody was not, but not who
    return Status::Ok();
  }

  void WriteFromOwner() {
    from_owner_.assign(1, static_cast<std::byte>((any_not_finite_ ? kLowRankNotFinite : 0) |
                                                 (any_replan_ ? kLowRankReplan : 0)));
  }

  // ---- the mean

  T RankWeight() const { return T(1) / static_cast<T>(group_.size); }

  SentFactors<T> Stacked(const std::vector<SentFactors<T>>& all) const {
    SentFactors<T> stack;
    for (const SentFactors<T>& one : all) {
      stack.k += one.k;
      stack.ut.insert(stack.ut.end(), one.ut.begin(), one.ut.end());
      for (T value : one.vt) stack.vt.push_back(value * RankWeight());
    }
    return stack;
  }

  void ReduceAsOwner(const std::vector<SentFactors<T>>& all) {
    WriteFromOwner();
    if (any_not_finite_) return;
    Terms<T> terms;
    for (const SentFactors<T>& one : all) {
      if (one.k > 0) terms.factors.push_back({one.Ut(m()), one.Vt(columns()), RankWeight()});
    }
    std::vector<std::byte> bytes;
    result_ = state_->owner.Compress(env_.cpu_level, terms, settings_.feedback, settings_.options,
                                     settings_.wire, bytes);
    from_owner_.push_back(static_cast<std::byte>(result_.k));
    from_owner_.insert(from_owner_.end(), bytes.begin(), bytes.end());
  }

  // ---- power iteration

  static void AppendMatrix(const std::vector<T>& values, GatherBuffer& out) {
    out.Reference(values.data(), values.size() * sizeof(T));
  }

  // The mean of what the ranks sent in this round.
  Status MeanOf(int round, std::span<const ByteSpan> shares, const std::vector<T>& own,
                std::vector<T>& mean) {
    mean.assign(static_cast<size_t>(settings_.options.rank * (round == 0 ? m() : columns())), T(0));
    std::vector<T> values;
    for (int r = 0; r < group_.size; ++r) {
      if (group_.Joined(r)) continue;
      if (r == group_.rank) {
        Note(r, state_->finite, step_.mine->replan);
        if (state_->finite) AddWeighted<T>(own, RankWeight(), mean);
        continue;
      }
      uint8_t flags = 0;
      DAD_RETURN_IF_ERROR(ReadPowerShare(spec_, r, shares[static_cast<size_t>(r)],
                                         static_cast<int64_t>(mean.size()), flags, values));
      Note(r, (flags & kLowRankNotFinite) == 0, (flags & kLowRankReplan) != 0);
      AddWeighted<T>(values, RankWeight(), mean);
    }
    return Status::Ok();
  }

  Status ReceivePower(int round, std::span<const ByteSpan> shares) {
    const int64_t r = settings_.options.rank;
    if (round % 2 == 0) {
      if (!IsOwner()) return Status::Ok();
      std::vector<T>& sum = round == 0 ? result_.ut : result_.vt;
      DAD_RETURN_IF_ERROR(
          MeanOf(round, shares, round == 0 ? state_->sent.ut : state_->sent.vt, sum));
      if (round == 0) OrthonormaliseRows(ViewOf(result_.ut.data(), r, m()));
      WriteFromOwner();
      if (!any_not_finite_) {
        const auto* bytes = reinterpret_cast<const std::byte*>(sum.data());
        from_owner_.insert(from_owner_.end(), bytes, bytes + sum.size() * sizeof(T));
      }
      return Status::Ok();
    }
    if (step_.mine == nullptr) return Status::Ok();
    if (!IsOwner()) {
      uint8_t flags = 0;
      DAD_RETURN_IF_ERROR(ReadPowerShare(spec_, settings_.owner, OwnersShare(shares),
                                         r * (round == 1 ? m() : columns()), flags,
                                         round == 1 ? result_.ut : result_.vt));
      Note(-1, (flags & kLowRankNotFinite) == 0, (flags & kLowRankReplan) != 0);
    }
    if (round == 1) {
      state_->sent.vt.assign(static_cast<size_t>(r * columns()), T(0));
      if (!any_not_finite_ && state_->finite) {
        state_->rank.ProjectBack(env_.cpu_level, ViewOf<const T>(result_.ut.data(), r, m()),
                                 ViewOf(state_->sent.vt.data(), r, columns()));
      }
      return Status::Ok();
    }
    result_.k = r;
    if (!any_not_finite_) {
      const std::vector<T> start = NextPowerStart(ViewOf<const T>(result_.vt.data(), r, columns()));
      const MatrixView<const T> next = ViewOf<const T>(start.data(), r, columns());
      if (settings_.feedback == Feedback::kNone) {
        state_->rank.Undo(env_.cpu_level, terms_);
        state_->rank.Subtract({}, next);
      } else {
        // The mean counts all ranks; those that have joined subtract nothing.
        SentFactors<T> mine = result_;
        const T share = static_cast<T>(group_.size) / static_cast<T>(NumActive());
        for (T& value : mine.vt) value *= share;
        state_->rank.Subtract(std::move(mine), next);
      }
    }
    return Status::Ok();
  }

  // ---- the result

  void WriteOutput() {
    const LayerInput& layer = step_.mine->layers[0];
    const int64_t in = settings_.layer.in;
    T* weight = weight_.Take(layer.output, m() * in);
    T* bias = settings_.layer.bias ? bias_.Take(layer.output_bias, m()) : nullptr;
    const T scale = static_cast<T>(
        spec_.postscale * (spec_.op == ReduceOp::kSum ? static_cast<double>(group_.size) : 1.0));
    const MatrixView<const T> ut = result_.Ut(m());
    const MatrixView<const T> vt = result_.Vt(columns());
    if (any_not_finite_) {
      std::fill_n(weight, m() * in, std::numeric_limits<T>::quiet_NaN());
      if (bias != nullptr) std::fill_n(bias, m(), std::numeric_limits<T>::quiet_NaN());
    } else if (layer.transposed) {
      AddOuter<T>(env_.cpu_level, scale, vt.Cols(0, in), ut, T(0), ViewOf(weight, in, m()));
      if (bias != nullptr) {
        AddOuter<T>(env_.cpu_level, scale, vt.Cols(in, 1), ut, T(0), ViewOf(bias, 1, m()));
      }
    } else {
      ExpandFactors<T>(env_.cpu_level, scale, ut, vt, T(0), ViewOf(weight, m(), in), bias);
    }
    weight_.Deliver();
    if (bias != nullptr) bias_.Deliver();
  }

  const TensorSpec spec_;
  const LowRankSettings settings_;
  const ExchangeEnv env_;
  Group group_;
  StepInput step_;
  std::shared_ptr<LowRankState<T>> state_;
  Terms<T> terms_;
  std::deque<std::vector<T>> converted_;
  std::vector<std::byte> from_owner_;
  SentFactors<T> result_;  // what every rank applies
  LayerResult<T> weight_;
  LayerResult<T> bias_;
  bool any_not_finite_ = false;
  int not_finite_rank_ = -1;  // the first that is known
  bool any_replan_ = false;
};

}  // namespace

int64_t LowRankShareBytes(const TensorSpec& spec) {
  const Method& method = spec.method;
  const auto wire = ParseWire(method.Text("wire", "int4"));
  const auto rank = method.Integer("rank", 4);
  if (!wire.ok() || !rank.ok() || method.layers().empty()) return 0;
  const LayerShape& layer = method.layers()[0];
  return static_cast<int64_t>(
      EncodedBytes(wire.value(), rank.value(), layer.out, spec.dtype) +
      EncodedBytes(wire.value(), rank.value(), layer.in + (layer.bias ? 1 : 0), spec.dtype));
}

Result<std::unique_ptr<Exchange>> MakeLowRankExchange(const TensorSpec& spec,
                                                      const ExchangeEnv& env) {
  const Result<LowRankSettings> settings = ParseLowRankSettings(spec);
  if (!settings.ok()) return settings.status();
  return MakeForType<LowRankExchange>(spec, settings.value(), env);
}

}  // namespace dad
