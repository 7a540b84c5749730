#include "exchange/device/low_rank.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "exchange/by_method.h"
#include "exchange/device/low_rank_side.h"
#include "exchange/device/refusal.h"
#include "exchange/device/transfer.h"
#include "exchange/low_rank_share.h"
#include "exchange/shares.h"

namespace dad {
namespace {

class DeviceLowRankState final : public ExchangeState {
 public:
  DeviceLowRankState(const LowRankSettings& settings, std::shared_ptr<DeviceBench> bench)
      : rank(*bench, settings.layer.out, settings.columns(), settings.layer.bias,
             LowRankSeed(settings, 1)),
        owner(*bench, settings.layer.out, settings.columns(), settings.layer.bias,
              LowRankSeed(settings, 2)),
        m(settings.layer.out),
        columns(settings.columns()),
        bench_(std::move(bench)) {}

  void Export(std::vector<StateTensor>& out) override {
    rank.Export("rank_", out);
    owner.Export("owner_", out);
  }
  Status Import(const std::vector<StateTensor>& tensors) override {
    DAD_RETURN_IF_ERROR(rank.Import("rank_", tensors));
    return owner.Import("owner_", tensors);
  }
  // What was applied came from the owner's residual; without an owner from everybody's.
  void ReturnLast() override { (last_by_owner ? owner : rank).ReturnSent(); }

  DeviceLowRankSide rank;
  DeviceLowRankSide owner;
  const int64_t m;
  const int64_t columns;
  bool last_by_owner = true;

 private:
  const std::shared_ptr<DeviceBench> bench_;  // the sides use it
};

class DeviceLowRankExchange final : public Exchange {
 public:
  DeviceLowRankExchange(const TensorSpec& spec, const LowRankSettings& settings,
                        const ExchangeEnv& env)
      : spec_(spec), settings_(settings), env_(env), bench_(*env.bench) {}
  ~DeviceLowRankExchange() override { Release(); }

  Status Begin(const StepInput& input, const Group& group) override {
    group_ = group;
    step_ = input;
    event_ = nullptr;
    waits_ = false;
    compresses_ = nullptr;
    result_ = {};
    result_weight_ = 1;
    any_not_finite_ = any_replan_ = owner_sent_ = false;
    refusal_.Clear();
    DAD_RETURN_IF_ERROR(bench_.Open());
    DAD_RETURN_IF_ERROR(FindState());
    state_->last_by_owner = settings_.combine == LowRankCombine::kOwner;
    state_->rank.ForgetSent();
    state_->owner.ForgetSent();
    if (input.mine == nullptr) return Status::Ok();
    if (input.mine->layers.size() != 1) {
      return Status::InvalidArgument("\"" + spec_.name + "\": expected one layer, got " +
                                     std::to_string(input.mine->layers.size()));
    }
    return OrRefuse(AddTerms(), from_rank_);
  }

  int num_rounds() const override { return settings_.combine == LowRankCombine::kGather ? 1 : 2; }
  int device() const override { return bench_.device(); }
  DeviceEvent device_event() const override { return event_; }

  // Indices of rows have to be looked at first; then the iteration, all of it at once.
  Result<DeviceEvent> Ready(int round) override {
    if (waits_) {
      waits_ = false;
      return event_;
    }
    if (index_on_host_ != nullptr) {
      DAD_RETURN_IF_ERROR(OrRefuse(AddIndexed(), from_rank_));
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

  Status Send(int round, int peer, GatherBuffer& out) override {
    if (!Travels(round, group_.rank, peer)) return Status::Ok();
    const std::vector<std::byte>& share = round == 1 ? from_owner_ : from_rank_;
    out.Reference(share.data(), share.size());
    return Status::Ok();
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
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
    return OrRefuse(Combine(all, weight), from_owner_);
  }

  Status Finish() override {
    if (refusal_.there()) {
      DAD_RETURN_IF_ERROR(Record());
      Release();
      return refusal_.status(spec_);
    }
    if (!any_not_finite_) {
      if (step_.mine != nullptr) {
        if (moves_owner_) state_->owner.Clear();
        state_->rank.Commit();
      }
      if (owner_sent_) state_->owner.Commit();
    }
    Status written;
    if (step_.mine != nullptr) {
      if (step_.report != nullptr) {
        step_.report->replan = any_replan_;
        step_.report->not_finite = any_not_finite_;
        step_.report->effective = static_cast<double>(result_.k);
      }
      written = Refusal::Late(spec_, group_.rank, WriteOutput());
    }
    DAD_RETURN_IF_ERROR(Record());
    Release();
    return written;
  }

  void Cancel() override { Release(); }

 private:
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

  Status FindState() {
    auto make = [&] { return std::make_shared<DeviceLowRankState>(settings_, env_.bench); };
    auto found = StateOf<DeviceLowRankState>(spec_, env_, make);
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    if (state_->m == m() && state_->columns == settings_.columns()) return Status::Ok();
    return Status::InvalidArgument("\"" + spec_.name + "\": its shape has changed");
  }

  // ---- this rank's gradient

  Status AddTerms() {
    const LayerInput& layer = step_.mine->layers[0];
    DeviceLowRankSide& side = state_->rank;
    const float scale = Scale();
    DAD_RETURN_IF_ERROR(side.Begin());
    for (const RowsSegment& segment : layer.rows) {
      const auto d = ValuesOf<float>(bench_, segment.d, arena_);
      if (!d.ok()) return d.status();
      const auto a = ValuesOf<float>(bench_, segment.a, arena_);
      if (!a.ok()) return a.status();
      const int64_t out_count = segment.d.shape[1];
      DAD_RETURN_IF_ERROR(side.AddRows(d.value(), a.value(), segment.a.shape[0],
                                       out_count == m() ? 0 : segment.out_begin, out_count, scale));
    }
    const auto dense = ValuesOf<float>(bench_, layer.dense, arena_);
    if (!dense.ok()) return dense.status();
    const auto bias = ValuesOf<float>(bench_, layer.dense_bias, arena_);
    if (!bias.ok()) return bias.status();
    DAD_RETURN_IF_ERROR(side.AddDense(dense.value(), bias.value(), scale));
    // A new plan has given the layer to another owner: what is left here goes the way of this
    // rank's own gradients, where it counts 1/W.
    moves_owner_ = !IsOwner() && !state_->owner.empty();
    if (moves_owner_) {
      DAD_RETURN_IF_ERROR(side.AddSide(state_->owner, static_cast<float>(group_.size)));
    }
    if (layer.indexed.empty()) return Compress(side);
    size_t num_bytes = 0;
    for (const IndexedSegment& segment : layer.indexed) num_bytes += segment.index.num_bytes();
    const Result<std::byte*> pinned = pinned_.Take(bench_, num_bytes);
    if (!pinned.ok()) return pinned.status();
    index_on_host_ = pinned.value();
    std::byte* to = pinned.value();
    for (const IndexedSegment& segment : layer.indexed) {
      DAD_RETURN_IF_ERROR(bench_.WaitFor(segment.index));
      DAD_RETURN_IF_ERROR(bench_.Copy(to, segment.index.data, segment.index.num_bytes()));
      to += segment.index.num_bytes();
    }
    waits_ = true;
    return Record();
  }

  float Scale() const { return static_cast<float>(step_.mine->scale * spec_.prescale); }

  Status AddIndexed() {
    const auto* next = reinterpret_cast<const int64_t*>(std::exchange(index_on_host_, nullptr));
    for (const IndexedSegment& segment : step_.mine->layers[0].indexed) {
      const int64_t rows = segment.index.num_elements();
      const std::span<const int64_t> found(next, static_cast<size_t>(rows));
      next += rows;
      if (const std::string why = Refusal::Outside(found, m()); !why.empty()) {
        return Status::Unavailable(why);
      }
      const std::vector<uint32_t> index(found.begin(), found.end());
      const auto x = ValuesOf<float>(bench_, segment.x, arena_);
      if (!x.ok()) return x.status();
      DAD_RETURN_IF_ERROR(state_->rank.AddIndexed(x.value(), index, Scale()));
    }
    return Compress(state_->rank);
  }

  // The owner's part: S = E + (1/W) Σ C.
  Status Combine(const std::vector<SentFactors<float>>& all, float weight) {
    DeviceFactors stack;
    DAD_RETURN_IF_ERROR(Stack(all, stack));
    owner_sent_ = true;
    DAD_RETURN_IF_ERROR(state_->owner.Begin());
    DAD_RETURN_IF_ERROR(state_->owner.AddFactors(stack, weight));
    return Compress(state_->owner);
  }

  // What this rank cannot do it says in `share`; the step goes on without it.
  Status OrRefuse(const Status& status, std::vector<std::byte>& share) {
    if (status.ok() || !Refusal::Is(status)) return status;
    refusal_.Note(group_.rank, status.message());
    WriteRefusal(share);
    compresses_ = nullptr;
    index_on_host_ = nullptr;
    DAD_RETURN_IF_ERROR(Record());
    waits_ = false;
    return Status::Ok();
  }

  Status Compress(DeviceLowRankSide& side) {
    DAD_RETURN_IF_ERROR(side.Compress(settings_.options, settings_.wire));
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
    const LayerInput& layer = step_.mine->layers[0];
    const int64_t in = settings_.layer.in, columns = settings_.columns(), k = result_.k;
    DeviceResult<float> weight, bias;
    DAD_RETURN_IF_ERROR(weight.Take(bench_, layer.output, arena_));
    if (settings_.layer.bias) DAD_RETURN_IF_ERROR(bias.Take(bench_, layer.output_bias, arena_));
    if (!any_not_finite_ && k > 0) {
      const auto scale = static_cast<float>(
          spec_.postscale * (spec_.op == ReduceOp::kSum ? static_cast<double>(group_.size) : 1.0) *
          result_weight_);
      const Result<DeviceProducts*> products = bench_.Products();
      if (!products.ok()) return products.status();
      const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
      const DeviceMatrix<const float> ut{result_.ut, k, m()}, vt{result_.vt, k, in, columns};
      DAD_RETURN_IF_ERROR(products.value()->Multiply<float>(
          layer.transposed ? vt : ut, true, layer.transposed ? ut : vt, false,
          {weight.values(), layer.transposed ? in : m(), layer.transposed ? m() : in}, scale));
      if (settings_.layer.bias) {
        DAD_RETURN_IF_ERROR(products.value()->Multiply<float>(
            ut, true, {result_.vt + in, k, 1, columns}, false, {bias.values(), m(), 1}, scale));
      }
    }
    DAD_RETURN_IF_ERROR(weight.Deliver(bench_, 1, 1, any_not_finite_));
    return bias.Deliver(bench_, 1, 1, any_not_finite_);
  }

  Status Record() {
    Result<DeviceEvent> event = bench_.Record();
    if (!event.ok()) return event.status();
    event_ = std::move(event).value();
    return Status::Ok();
  }

  // Device memory goes back at once, page-locked memory when the device is through.
  void Release() {
    pinned_.ReleaseAfter(bench_, event_);
    arena_.Release();
    compresses_ = nullptr;
    index_on_host_ = nullptr;
    waits_ = false;
    // Once: by the time this one goes another exchange may be in a step with the same state.
    const std::shared_ptr<DeviceLowRankState> state = std::exchange(state_, nullptr);
    if (state == nullptr) return;
    state->rank.End(event_);
    state->owner.End(event_);
  }

  const TensorSpec spec_;
  const LowRankSettings settings_;
  const ExchangeEnv env_;
  DeviceBench& bench_;
  Group group_;
  StepInput step_;
  std::shared_ptr<DeviceLowRankState> state_;
  // Of the step.
  DeviceEvent event_;
  bool waits_ = false;                       // the event is still to be told
  DeviceLowRankSide* compresses_ = nullptr;  // whose directions are still to be read
  const std::byte* index_on_host_ = nullptr;
  DeviceArena arena_;
  PinnedKeep pinned_;
  std::vector<std::byte> from_rank_, from_owner_;  // shares
  DeviceFactors result_;                           // what every rank applies,
  float result_weight_ = 1;                        // times this
  Refusal refusal_;
  bool moves_owner_ = false;
  bool owner_sent_ = false;
  bool any_not_finite_ = false;
  bool any_replan_ = false;
};

}  // namespace

bool LowRankOnDevice(const TensorSpec& spec, const MethodText& method, const ExchangeEnv& env) {
  if (!env.device_products || spec.device != DeviceType::kCuda || spec.dtype == DType::kFloat64 ||
      method.name() != "low_rank") {
    return false;
  }
  const Result<LowRankSettings> settings = ParseLowRankSettings(spec, method);
  return settings.ok() && settings.value().combine != LowRankCombine::kPower &&
         settings.value().feedback == Feedback::kDense && settings.value().layer.out > 0 &&
         settings.value().layer.in > 0;
}

Result<std::unique_ptr<Exchange>> MakeDeviceLowRankExchange(const TensorSpec& spec,
                                                            const MethodText& method,
                                                            const ExchangeEnv& env) {
  const Result<LowRankSettings> settings = ParseLowRankSettings(spec, method);
  if (!settings.ok()) return settings.status();
  return std::unique_ptr<Exchange>(
      std::make_unique<DeviceLowRankExchange>(spec, settings.value(), env));
}

}  // namespace dad
