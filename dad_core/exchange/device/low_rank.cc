#include "exchange/device/low_rank.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "exchange/by_method.h"
#include "exchange/device/device_exchange.h"
#include "exchange/device/layer_result.h"
#include "exchange/device/layer_terms.h"
#include "exchange/device/low_rank_side.h"
#include "exchange/device/power.h"
#include "exchange/method/low_rank/low_rank_share.h"
#include "exchange/share/shares.h"

namespace dad {
namespace {

class DeviceLowRankExchange final : public DeviceExchange {
 public:
  DeviceLowRankExchange(const TensorSpec& spec, const LowRankSettings& settings,
                        const ExchangeEnv& env)
      : DeviceExchange(spec, env), settings_(settings), terms_(bench_) {}
  ~DeviceLowRankExchange() override { Drop(); }

  int num_rounds() const override { return settings_.combine == LowRankCombine::kGather ? 1 : 2; }
  // Indices of rows have to be looked at first; then the iteration, all of it at once.
  Result<DeviceEvent> Ready(int round) override {
    if (waits_) {
      waits_ = false;
      return event_;
    }
    if (terms_.has_indices()) {
      DAD_RETURN_IF_ERROR(OrRefuse(AddIndexed()));
      waits_ = false;
      return event_;
    }
    if (compresses_ == nullptr) return DeviceEvent();
    compresses_->Read();
    compresses_ = nullptr;
    if (round == 0) {
      WriteFromRank();
    } else {
      // Of finite factors: too large a sum is the same to all as a gradient that is not finite.
      any_not_finite_ = any_not_finite_ || !state_->owner.finite();
      result_ = state_->owner.sent();
      WriteFromOwner();
    }
    return DeviceEvent();
  }

  // Even rounds go to the owner, odd ones come from it; gather goes from all to all.
  bool SendsLength(int round, int peer) const override { return Travels(round, group_.rank, peer); }
  int64_t ReceiveBytes(int round, int peer) const override {
    return Travels(round, peer, group_.rank) ? -1 : 0;
  }

 private:
  void Reset() override {
    waits_ = false;
    compresses_ = nullptr;
    result_ = {};
    result_weight_ = 1;
    any_not_finite_ = any_replan_ = owner_sent_ = false;
    refuses_in_ = &from_rank_;
  }
  bool Computes() const override { return true; }  // as owner
  void Refuse(const std::string& why) override {
    refusal_.Note(group_.rank, why);
    WriteRefusal(*refuses_in_);
    compresses_ = nullptr;
    waits_ = false;
    terms_.End(event_);
  }
  // In the round that goes to the owner, who tells all others which was the first.
  Result<bool> AnyRefused(int, std::span<const ByteSpan>) override { return false; }

  Status Compute() override {
    auto found = FindLowRankState(spec_, settings_, env_);
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    state_->last_by_owner = settings_.combine == LowRankCombine::kOwner;
    state_->rank.ForgetSent();
    state_->owner.ForgetSent();
    if (step_.mine == nullptr) return Status::Ok();
    DAD_RETURN_IF_ERROR(CheckOneLayer());
    return AddTerms();
  }

  Status SendShare(int round, int peer, GatherBuffer& out) override {
    if (!Travels(round, group_.rank, peer)) return Status::Ok();
    const std::vector<std::byte>& share = round == 1 ? from_owner_ : from_rank_;
    out.Reference(share.data(), share.size());
    return Status::Ok();
  }

  Status ReceiveShares(int round, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r != group_.rank && ReceiveBytes(round, r) == 0) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[static_cast<size_t>(r)], 0));
      }
    }
    if (round == 1) {
      if (IsOwner() || step_.mine == nullptr) return Status::Ok();
      const ByteSpan share = shares[static_cast<size_t>(settings_.owner)];
      refusal_.Clear();  // ours may not be the first
      if (refusal_.Read(share)) return Status::Ok();
      SentFactors<float> sent;
      DAD_RETURN_IF_ERROR(ReadShare(settings_.owner, share, sent));
      return Refusal::Late(spec_, group_.rank, Bring(sent, result_));
    }
    if (settings_.combine == LowRankCombine::kOwner && !IsOwner()) return Status::Ok();
    std::vector<SentFactors<float>> all(static_cast<size_t>(group_.size));
    const Refusal mine = std::exchange(refusal_, {});
    for (int r = 0; r < group_.size; ++r) {
      const auto i = static_cast<size_t>(r);
      if (group_.Joined(r)) continue;
      if (r == group_.rank) {
        if (mine.there()) {
          refusal_.Note(mine.why());
        } else {
          Note(state_->rank.finite(), step_.mine->replan);
        }
      } else if (refusal_.Read(shares[i])) {
        continue;
      } else if (Travels(round, r, group_.rank)) {
        DAD_RETURN_IF_ERROR(ReadShare(r, shares[i], all[i]));
      }
    }
    if (step_.mine == nullptr && mine.there()) refusal_.Note(mine.why());  // as owner
    const float weight = 1.0f / static_cast<float>(group_.size);
    if (refusal_.there()) {
      WriteRefusal(from_owner_);
      return Status::Ok();
    }
    if (any_not_finite_) {
      WriteFromOwner();
      return Status::Ok();
    }
    if (settings_.combine == LowRankCombine::kGather) {
      result_weight_ = weight;
      return Refusal::Late(spec_, group_.rank, Stack(all, result_));
    }
    refuses_in_ = &from_owner_;
    return OrRefuse(Combine(all, weight));
  }

  Status Deliver() override {
    if (!any_not_finite_) {
      if (step_.mine != nullptr) {
        if (moves_owner_) state_->owner.Clear();
        state_->rank.Commit();
      }
      if (owner_sent_) state_->owner.Commit();
    }
    if (step_.mine == nullptr) return Status::Ok();
    if (step_.report != nullptr) {
      step_.report->replan = any_replan_;
      step_.report->not_finite = any_not_finite_;
      step_.report->effective = static_cast<double>(result_.k);
    }
    return Refusal::Late(spec_, group_.rank, WriteOutput());
  }

  void Drop() override {
    terms_.End(event_);
    compresses_ = nullptr;
    waits_ = false;
    // Once: by the time this one goes another exchange may be in a step with the same state.
    const std::shared_ptr<DeviceLowRankState> state = std::exchange(state_, nullptr);
    if (state == nullptr) return;
    state->rank.End(event_);
    state->owner.End(event_);
  }

  int64_t m() const { return settings_.layer.out; }
  bool IsOwner() const { return group_.rank == settings_.owner; }

  bool Travels(int round, int from, int to) const {
    if (from == to) return false;
    if (settings_.combine == LowRankCombine::kGather) {
      return !group_.Joined(from) && !group_.Joined(to);
    }
    if (round == 0) return to == settings_.owner && !group_.Joined(from);
    return from == settings_.owner && !group_.Joined(to);
  }

  // ---- this rank's gradient

  Status AddTerms() {
    const LayerInput& layer = step_.mine->layers[0];
    DeviceLowRankSide& side = state_->rank;
    terms_.Begin(layer, m(), static_cast<float>(step_.mine->scale * spec_.prescale));
    // A new plan has given the layer to another owner: what is left here goes the way of this
    // rank's own gradients, where it counts 1/W.
    moves_owner_ = !IsOwner() && !state_->owner.empty();
    if (HasRowsAlone(layer) && !moves_owner_) {
      const Result<std::vector<DeviceRows>> rows = terms_.Rows(arena_);
      if (!rows.ok()) return rows.status();
      DAD_RETURN_IF_ERROR(side.CompressRows(rows.value(), settings_.options, settings_.wire));
      return WaitFor(side);
    }
    DAD_RETURN_IF_ERROR(side.Begin(settings_.feedback));
    DAD_RETURN_IF_ERROR(terms_.Add(side, arena_));
    if (moves_owner_) {
      DAD_RETURN_IF_ERROR(side.AddSide(state_->owner, static_cast<float>(group_.size)));
    }
    if (!terms_.has_indices()) return Compress(side);
    waits_ = true;
    return Record();
  }

  // Without feedback, and so few that G need not be formed.
  bool HasRowsAlone(const LayerInput& layer) const {
    int64_t count = 0;
    for (const RowsSegment& segment : layer.rows) count += segment.a.shape[0];
    return settings_.feedback == Feedback::kNone && !layer.rows.empty() && layer.indexed.empty() &&
           layer.dense.data == nullptr && layer.dense_bias.data == nullptr &&
           state_->rank.IsExact(count, settings_.options);
  }

  Status AddIndexed() {
    DAD_RETURN_IF_ERROR(terms_.AddIndexed(state_->rank, arena_));
    return Compress(state_->rank);
  }

  // The owner's part: S = E + (1/W) Σ C.
  Status Combine(const std::vector<SentFactors<float>>& all, float weight) {
    DeviceFactors stack;
    DAD_RETURN_IF_ERROR(Stack(all, stack));
    owner_sent_ = true;
    DeviceLowRankSide& side = state_->owner;
    if (settings_.feedback == Feedback::kNone && side.IsExact(stack.k, settings_.options)) {
      const DeviceRows rows{stack.ut, stack.vt, stack.k, 0, m(), settings_.columns(), weight};
      DAD_RETURN_IF_ERROR(side.CompressRows({&rows, 1}, settings_.options, settings_.wire));
      return WaitFor(side);
    }
    DAD_RETURN_IF_ERROR(side.Begin(settings_.feedback));
    DAD_RETURN_IF_ERROR(side.AddFactors(stack, weight));
    return Compress(side);
  }

  Status Compress(DeviceLowRankSide& side) {
    DAD_RETURN_IF_ERROR(side.Compress(settings_.options, settings_.wire));
    return WaitFor(side);
  }
  Status WaitFor(DeviceLowRankSide& side) {
    compresses_ = &side;
    waits_ = true;
    return Record();
  }

  // ---- factors on the wire

  void Note(bool finite, bool replan) {
    any_not_finite_ = any_not_finite_ || !finite;
    any_replan_ = any_replan_ || replan;
  }

  Status ReadShare(int rank, ByteSpan share, SentFactors<float>& factors) {
    uint8_t flags = 0;
    DAD_RETURN_IF_ERROR(ReadLowRankShare<float>(spec_, settings_, rank, share, flags, factors));
    Note((flags & kLowRankNotFinite) == 0, (flags & kLowRankReplan) != 0);
    return Status::Ok();
  }

  void WriteRefusal(std::vector<std::byte>& share) const {
    ByteWriter out;
    refusal_.Write(out);
    share = out.bytes();
  }
  void WriteFromRank() {
    WriteShare(state_->rank, state_->rank.finite(), step_.mine->replan, from_rank_);
  }
  void WriteFromOwner() { WriteShare(state_->owner, !any_not_finite_, any_replan_, from_owner_); }
  static void WriteShare(const DeviceLowRankSide& side, bool finite, bool replan,
                         std::vector<std::byte>& share) {
    share.assign(1, static_cast<std::byte>((finite ? 0 : kLowRankNotFinite) |
                                           (replan ? kLowRankReplan : 0)));
    if (!finite) return;
    share.push_back(static_cast<std::byte>(side.sent().k));
    side.AppendSent(share);
  }

  Status Bring(const SentFactors<float>& sent, DeviceFactors& factors) {
    if (sent.k == 0) return Status::Ok();
    auto* ut = arena_.Take<float>(bench_, sent.k * m());
    auto* vt = arena_.Take<float>(bench_, sent.k * settings_.columns());
    DAD_RETURN_IF_ERROR(arena_.status());
    DAD_RETURN_IF_ERROR(Upload(bench_, std::as_bytes(std::span(sent.ut)), ut));
    DAD_RETURN_IF_ERROR(Upload(bench_, std::as_bytes(std::span(sent.vt)), vt));
    factors = {sent.k, ut, vt};
    return Status::Ok();
  }

  // The factors of all, in the order of ranks: of the others as they came, our own, which are what
  // the others decode, from where they lie.
  Status Stack(const std::vector<SentFactors<float>>& others, DeviceFactors& stack) {
    SentFactors<float> host;
    DeviceFactors own;
    int64_t before = 0;
    for (int r = 0; r < group_.size; ++r) {
      const SentFactors<float>& one = others[static_cast<size_t>(r)];
      host.k += one.k;
      host.ut.insert(host.ut.end(), one.ut.begin(), one.ut.end());
      host.vt.insert(host.vt.end(), one.vt.begin(), one.vt.end());
      if (r != group_.rank || step_.mine == nullptr) continue;
      own = state_->rank.sent();
      before = host.k;
      host.k += own.k;
      host.ut.resize(static_cast<size_t>(host.k * m()));
      host.vt.resize(static_cast<size_t>(host.k * settings_.columns()));
    }
    DAD_RETURN_IF_ERROR(Bring(host, stack));
    const auto put = [&](const float* to, const float* from, int64_t cols) {
      return bench_.Copy(const_cast<float*>(to) + before * cols, from,
                         static_cast<size_t>(own.k * cols) * sizeof(float));
    };
    DAD_RETURN_IF_ERROR(put(stack.ut, own.ut, m()));
    return put(stack.vt, own.vt, settings_.columns());
  }

  // ---- the result

  Status WriteOutput() {
    const double scale = spec_.postscale * result_weight_ *
                         (spec_.op == ReduceOp::kSum ? static_cast<double>(group_.size) : 1.0);
    return WriteFactors(bench_, step_.mine->layers[0], settings_.layer, result_,
                        static_cast<float>(scale), any_not_finite_, arena_);
  }

  const LowRankSettings settings_;
  std::shared_ptr<DeviceLowRankState> state_;
  // State of the current step.
  bool waits_ = false;                       // the event is still to be told
  DeviceLowRankSide* compresses_ = nullptr;  // whose directions are still to be read
  LayerTerms terms_;
  std::vector<std::byte> from_rank_, from_owner_;  // shares
  std::vector<std::byte>* refuses_in_ = &from_rank_;
  DeviceFactors result_;     // what every rank applies,
  float result_weight_ = 1;  // times this
  bool moves_owner_ = false;
  bool owner_sent_ = false;
  bool any_not_finite_ = false;
  bool any_replan_ = false;
};

}  // namespace

bool LowRankOnDevice(const TensorSpec& spec, const ExchangeEnv& env) {
  if (!env.device_products || spec.dtype == DType::kFloat64) return false;
  const Result<LowRankSettings> settings = ParseLowRankSettings(spec);
  return settings.ok() && settings.value().feedback != Feedback::kRows &&
         settings.value().layer.out > 0 && settings.value().layer.in > 0;
}

Result<std::unique_ptr<Exchange>> MakeDeviceLowRankExchange(const TensorSpec& spec,
                                                            const ExchangeEnv& env) {
  const Result<LowRankSettings> settings = ParseLowRankSettings(spec);
  if (!settings.ok()) return settings.status();
  if (settings.value().combine == LowRankCombine::kPower) {
    return MakeDevicePowerExchange(spec, settings.value(), env);
  }
  return std::unique_ptr<Exchange>(
      std::make_unique<DeviceLowRankExchange>(spec, settings.value(), env));
}

}  // namespace dad
