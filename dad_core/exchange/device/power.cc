#include "exchange/device/power.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "exchange/device/device_exchange.h"
#include "exchange/device/layer_result.h"
#include "exchange/device/layer_terms.h"
#include "exchange/device/low_rank_side.h"
#include "exchange/method/low_rank/power_share.h"
#include "exchange/share/shares.h"

namespace dad {
namespace {

class DevicePowerExchange final : public DeviceExchange {
 public:
  DevicePowerExchange(const TensorSpec& spec, const LowRankSettings& settings,
                      const ExchangeEnv& env)
      : DeviceExchange(spec, env), settings_(settings), terms_(bench_) {}
  ~DevicePowerExchange() override { Drop(); }

  int num_rounds() const override { return 4; }
  Result<DeviceEvent> Ready(int round) override {
    if (std::exchange(waits_, false)) return event_;
    if (terms_.has_indices()) {
      DAD_RETURN_IF_ERROR(OrRefuse(AddIndexed()));
      waits_ = false;
      return event_;
    }
    if (!std::exchange(projects_, false)) return DeviceEvent();
    DeviceLowRankSide& side = state_->rank;
    if (round == 0) {
      side.Read();
      finite_ = side.finite();
    }
    WriteFromRank(side.projected());
    return DeviceEvent();
  }

  // Even rounds go to the owner, odd ones come from it.
  bool SendsLength(int round, int peer) const override { return Travels(round, group_.rank, peer); }
  int64_t ReceiveBytes(int round, int peer) const override {
    return Travels(round, peer, group_.rank) ? -1 : 0;
  }

 private:
  void Reset() override {
    waits_ = projects_ = second_ = false;
    finite_ = true;
    any_not_finite_ = any_replan_ = false;
  }
  void Refuse(const std::string& why) override {
    refusal_.Note(group_.rank, why);
    WriteRefusal(from_rank_[second_ ? 1 : 0]);
    waits_ = projects_ = false;
    terms_.End(event_);
  }
  // In the rounds that go to the owner, who tells all others which was the first.
  Result<bool> AnyRefused(int, std::span<const ByteSpan>) override { return false; }

  // Not where this rank has joined: as owner it computes on the host.
  Status Compute() override {
    DAD_RETURN_IF_ERROR(CheckOneLayer());
    return AddTerms();
  }

  Status SendShare(int round, int peer, GatherBuffer& out) override {
    if (!Travels(round, group_.rank, peer)) return Status::Ok();
    const std::vector<std::byte>& share = round == 0   ? from_rank_[0]
                                          : round == 2 ? from_rank_[1]
                                                       : from_owner_[round / 2];
    out.Reference(share.data(), share.size());
    return Status::Ok();
  }

  Status ReceiveShares(int round, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r != group_.rank && ReceiveBytes(round, r) == 0) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[static_cast<size_t>(r)], 0));
      }
    }
    if (round % 2 == 0) return IsOwner() ? Reduce(round, shares) : Status::Ok();
    if (step_.mine == nullptr) return Status::Ok();
    if (!IsOwner()) {
      DAD_RETURN_IF_ERROR(TakeOwners(round, shares[static_cast<size_t>(settings_.owner)]));
    }
    if (round == 1) return BeginSecond();
    if (refusal_.there() || any_not_finite_) return Status::Ok();
    // The mean counts all ranks; those that have joined subtract nothing.
    const auto active = static_cast<float>(
        group_.size - std::count(group_.joined.begin(), group_.joined.end(), true));
    return state_->rank.TakeApplied(
        vt_, static_cast<float>(group_.size) / active,
        NextPowerStart(ViewOf<const float>(vt_.data(), r(), columns())));
  }

  Status Deliver() override {
    DeviceFactors applied;
    if (!any_not_finite_) {
      applied = state_->rank.sent();
      state_->rank.Commit();
      if (moves_owner_) state_->owner.Clear();
    }
    if (step_.report != nullptr) {
      step_.report->replan = any_replan_;
      step_.report->not_finite = any_not_finite_;
      step_.report->effective = static_cast<double>(r());
    }
    const double scale =
        spec_.postscale * (spec_.op == ReduceOp::kSum ? static_cast<double>(group_.size) : 1.0);
    return Refusal::Late(spec_, group_.rank,
                         WriteFactors(bench_, step_.mine->layers[0], settings_.layer, applied,
                                      static_cast<float>(scale), any_not_finite_, arena_));
  }

  void Drop() override {
    terms_.End(event_);
    waits_ = projects_ = false;
    // Once: by the time this one goes another exchange may be in a step with the same state.
    const std::shared_ptr<DeviceLowRankState> state = std::exchange(state_, nullptr);
    if (state != nullptr) state->rank.End(event_);
  }

  int64_t r() const { return settings_.options.rank; }
  int64_t m() const { return settings_.layer.out; }
  int64_t columns() const { return settings_.columns(); }
  bool IsOwner() const { return group_.rank == settings_.owner; }

  bool Travels(int round, int from, int to) const {
    if (from == to) return false;
    if (round % 2 == 0) return to == settings_.owner && !group_.Joined(from);
    return from == settings_.owner && !group_.Joined(to);
  }

  // ---- this rank's part

  Status AddTerms() {
    auto found = FindLowRankState(spec_, settings_, env_);
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    state_->last_by_owner = false;
    state_->rank.ForgetSent();
    state_->owner.ForgetSent();
    terms_.Begin(step_.mine->layers[0], m(),
                 static_cast<float>(step_.mine->scale * spec_.prescale));
    DAD_RETURN_IF_ERROR(state_->rank.Begin(settings_.feedback));
    DAD_RETURN_IF_ERROR(terms_.Add(state_->rank, arena_));
    // What an owner has kept from a plan before this one goes the way of its own gradients.
    moves_owner_ = !IsOwner() && !state_->owner.empty();
    if (moves_owner_) {
      DAD_RETURN_IF_ERROR(state_->rank.AddSide(state_->owner, static_cast<float>(group_.size)));
    }
    if (!terms_.has_indices()) return Project();
    waits_ = true;
    return Record();
  }

  Status AddIndexed() {
    DAD_RETURN_IF_ERROR(terms_.AddIndexed(state_->rank, arena_));
    return Project();
  }

  Status Project() {
    DAD_RETURN_IF_ERROR(state_->rank.Project(settings_.options));
    waits_ = projects_ = true;
    return Record();
  }

  // Q = U E'. In a step that does not count, zeros are sent, as on the host.
  Status BeginSecond() {
    if (refusal_.there()) {
      WriteRefusal(from_rank_[1]);
      return Status::Ok();
    }
    second_ = true;
    if (any_not_finite_ || !finite_) {
      WriteFromRank(std::vector<float>(static_cast<size_t>(r() * columns())));
      return Status::Ok();
    }
    return OrRefuse(ProjectBack());
  }
  Status ProjectBack() {
    DAD_RETURN_IF_ERROR(state_->rank.ProjectBack(ut_));
    waits_ = projects_ = true;
    return Record();
  }

  void WriteRefusal(std::vector<std::byte>& share) const {
    ByteWriter out;
    refusal_.Write(out);
    share = out.bytes();
  }

  static void WriteShare(bool finite, bool replan, std::span<const float> values,
                         std::vector<std::byte>& share) {
    share.assign(1, static_cast<std::byte>((finite ? 0 : kLowRankNotFinite) |
                                           (replan ? kLowRankReplan : 0)));
    const auto bytes = std::as_bytes(values);
    if (finite) share.insert(share.end(), bytes.begin(), bytes.end());
  }
  void WriteFromRank(std::span<const float> values) {
    if (IsOwner()) own_.assign(values.begin(), values.end());
    WriteShare(finite_, step_.mine->replan, values, from_rank_[second_ ? 1 : 0]);
  }

  // ---- the owner's

  void Note(bool finite, bool replan) {
    any_not_finite_ = any_not_finite_ || !finite;
    any_replan_ = any_replan_ || replan;
  }

  Status Reduce(int round, std::span<const ByteSpan> shares) {
    std::vector<float>& mean = round == 0 ? ut_ : vt_;
    std::vector<std::byte>& answer = from_owner_[round / 2];
    mean.assign(static_cast<size_t>(r() * (round == 0 ? m() : columns())), 0.0f);
    const float weight = 1.0f / static_cast<float>(group_.size);
    const Refusal mine = std::exchange(refusal_, {});
    std::vector<float> values;
    for (int rank = 0; rank < group_.size; ++rank) {
      const ByteSpan share = shares[static_cast<size_t>(rank)];
      if (group_.Joined(rank)) continue;
      if (rank == group_.rank) {
        if (mine.there()) {
          refusal_.Note(mine.why());
        } else {
          Note(finite_, step_.mine->replan);
          if (finite_) AddWeighted<float>(own_, weight, mean);
        }
      } else if (!refusal_.Read(share)) {
        uint8_t flags = 0;
        DAD_RETURN_IF_ERROR(
            ReadPowerShare(spec_, rank, share, static_cast<int64_t>(mean.size()), flags, values));
        Note((flags & kLowRankNotFinite) == 0, (flags & kLowRankReplan) != 0);
        AddWeighted<float>(values, weight, mean);
      }
    }
    if (refusal_.there()) {
      WriteRefusal(answer);
      return Status::Ok();
    }
    if (round == 0) OrthonormaliseRows(ViewOf(ut_.data(), r(), m()));
    WriteShare(!any_not_finite_, any_replan_, mean, answer);
    return Status::Ok();
  }

  // What came from the owner, for all but the owner.
  Status TakeOwners(int round, ByteSpan share) {
    refusal_.Clear();  // ours may not be the first
    if (refusal_.Read(share)) return Status::Ok();
    uint8_t flags = 0;
    DAD_RETURN_IF_ERROR(ReadPowerShare(spec_, settings_.owner, share,
                                       r() * (round == 1 ? m() : columns()), flags,
                                       round == 1 ? ut_ : vt_));
    Note((flags & kLowRankNotFinite) == 0, (flags & kLowRankReplan) != 0);
    return Status::Ok();
  }

  const LowRankSettings settings_;
  LayerTerms terms_;
  std::shared_ptr<DeviceLowRankState> state_;
  // State of the current step.
  bool waits_ = false;     // the event is still to be told
  bool projects_ = false;  // P or Q is still to be read
  bool second_ = false;    // Q
  bool finite_ = true;
  bool moves_owner_ = false;
  std::vector<std::byte> from_rank_[2], from_owner_[2];  // shares, of P and of Q
  std::vector<float> own_;                               // the owner's P or Q
  std::vector<float> ut_, vt_;                           // what every rank applies
  bool any_not_finite_ = false;
  bool any_replan_ = false;
};

}  // namespace

Result<std::unique_ptr<Exchange>> MakeDevicePowerExchange(const TensorSpec& spec,
                                                          const LowRankSettings& settings,
                                                          const ExchangeEnv& env) {
  return std::unique_ptr<Exchange>(std::make_unique<DevicePowerExchange>(spec, settings, env));
}

}  // namespace dad
