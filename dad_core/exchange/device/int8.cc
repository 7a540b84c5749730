#include "exchange/device/int8.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "codec/int_quantise.h"
#include "exchange/by_method.h"
#include "exchange/device/device_exchange.h"
#include "exchange/device/int8_state.h"
#include "exchange/method/int8/int8.h"
#include "exchange/method/int8/int8_state.h"
#include "exchange/share/shares.h"

namespace dad {
namespace {

template <typename T>
class DeviceInt8Exchange final : public DeviceExchange {
 public:
  DeviceInt8Exchange(const TensorSpec& spec, int64_t bucket, bool feedback, const ExchangeEnv& env,
                     std::unique_ptr<Exchange> on_host)
      : DeviceExchange(spec, env, std::move(on_host)), bucket_(bucket), feedback_(feedback) {}

  int num_rounds() const override { return 2; }
  // What the step has recorded last is what the bytes of the round wait for.
  Result<DeviceEvent> Ready(int) override {
    if (event_ == waited_for_) return DeviceEvent();
    waited_for_ = event_;
    return event_;
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    return pieces_.MessageBytes(round, peer, group_.rank, group_);
  }

 private:
  void Reset() override {
    pieces_ = {NumElements(spec_.shape), bucket_, group_.size};
    any_not_finite_ = false;
    waited_for_ = nullptr;
  }
  bool Computes() const override { return true; }  // as owner
  void LeaveToHost() override { MoveState<DeviceInt8State<T>>(spec_, env_); }
  void Refuse(const std::string&) override { refusal_.NoteShort(group_.rank); }
  // Owners hear of it from those who refuse, all others from the owners.
  Result<bool> AnyRefused(int round, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r == group_.rank) continue;
      const ByteSpan share = shares[static_cast<size_t>(r)];
      DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, share, ReceiveBytes(round, r)));
      refusal_.ReadShort(share, group_.size);
    }
    return refusal_.there();
  }

  Status Compute() override {
    if (step_.mine != nullptr) DAD_RETURN_IF_ERROR(CheckContribution(spec_, *step_.mine, true));
    DAD_RETURN_IF_ERROR(FindState());
    state_->applied = {};
    return step_.mine == nullptr ? Status::Ok() : Quantise();
  }

  Status SendShare(int round, int peer, GatherBuffer& out) override {
    const int64_t bytes = pieces_.MessageBytes(round, group_.rank, peer, group_);
    if (bytes == 0) return Status::Ok();
    if (refusal_.there()) {
      refusal_.WriteShort(static_cast<size_t>(bytes), out);
      return Status::Ok();
    }
    if (round == 1) {
      out.Reference(result_, static_cast<size_t>(bytes));
      return Status::Ok();
    }
    // The size is known beforehand, so a flagged piece is as long as any other.
    out.AppendValue(static_cast<uint8_t>(Finite() ? 0 : 1));
    out.Reference(shares_ + kFlagBytes + pieces_.EncodedBegin(peer), pieces_.EncodedSize(peer));
    return Status::Ok();
  }

  Status ReceiveShares(int round, std::span<const ByteSpan> shares) override {
    return round == 0 ? OrRefuse(Reduce(shares)) : TakeResults(shares);
  }

  Status Deliver() override {
    if (step_.mine != nullptr) {
      if (step_.report != nullptr) step_.report->not_finite = any_not_finite_;
      DAD_RETURN_IF_ERROR(
          output_.Deliver(bench_, T(1), static_cast<T>(spec_.postscale), any_not_finite_));
    }
    if (feedback_ && !any_not_finite_) {
      if (step_.mine != nullptr) state_->residual = std::move(left_);
      if (pieces_.Size(group_.rank) > 0) {
        state_->owner_residual = std::move(owner_left_);
        state_->applied = std::move(applied_);
      }
    }
    return Status::Ok();
  }

  void Drop() override { left_ = owner_left_ = applied_ = {}; }

  static constexpr size_t kFlagBytes = 16;  // before the pieces: not finite, an int

  bool Finite() const {
    int not_finite = 0;
    std::memcpy(&not_finite, shares_, sizeof not_finite);
    return not_finite == 0;
  }

  Status FindState() {
    MoveState<Int8State<T>>(spec_, env_);
    auto make = [&] { return std::make_shared<DeviceInt8State<T>>(env_.bench); };
    auto found = StateOf<DeviceInt8State<T>>(spec_, env_, make);
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    DAD_RETURN_IF_ERROR(state_->MakeRoom(pieces_.count, state_->residual));
    DAD_RETURN_IF_ERROR(state_->MakeRoom(pieces_.Size(group_.rank), state_->owner_residual));
    if (state_->residual.count == pieces_.count &&
        state_->owner_residual.count == pieces_.Size(group_.rank)) {
      return Status::Ok();
    }
    return Status::InvalidArgument("\"" + spec_.name + "\": a saved residual of " +
                                   std::to_string(state_->residual.count) +
                                   " elements does not fit " + std::to_string(pieces_.count));
  }

  Status QuantisePiece(const T* x, int64_t count, uint8_t* bytes, T* decoded) {
    return bench_.Run<cuda::QuantiseInt8Kernel<T>>({x, count, bucket_, bytes, decoded});
  }
  // A kernel wants its scales aligned, the wire has pieces without gaps: each has memory of its
  // own.
  uint8_t* TakeEncoded(int piece, DeviceArena& arena) {
    return arena.Take<uint8_t>(bench_, static_cast<int64_t>(pieces_.EncodedSize(piece)));
  }

  Status Quantise() {
    const auto input = ValuesOf<T>(bench_, step_.mine->input, arena_);
    if (!input.ok()) return input.status();
    DAD_RETURN_IF_ERROR(state_->Take(pieces_.count, left_));
    DeviceArena work;
    auto* decoded = work.Take<T>(bench_, pieces_.count);
    auto* not_finite = work.Take<int>(bench_, 1);
    own_ = arena_.Take<T>(bench_, pieces_.Size(group_.rank));
    DAD_RETURN_IF_ERROR(work.status());
    DAD_RETURN_IF_ERROR(arena_.status());
    DAD_RETURN_IF_ERROR(bench_.Clear(not_finite, sizeof *not_finite));
    DAD_RETURN_IF_ERROR(bench_.Run<cuda::AddKeptKernel<T>>(
        {input.value(), pieces_.count, static_cast<T>(step_.mine->scale * spec_.prescale),
         feedback_ ? state_->residual.data() : nullptr, left_.data(), not_finite}));
    const Result<std::byte*> pinned =
        sent_.Take(bench_, kFlagBytes + pieces_.EncodedBegin(group_.size));
    if (!pinned.ok()) return pinned.status();
    shares_ = pinned.value();
    DAD_RETURN_IF_ERROR(bench_.Copy(pinned.value(), not_finite, sizeof *not_finite));
    for (int p = 0; p < group_.size; ++p) {
      if (pieces_.Size(p) == 0) continue;
      uint8_t* bytes = TakeEncoded(p, work);
      DAD_RETURN_IF_ERROR(work.status());
      DAD_RETURN_IF_ERROR(QuantisePiece(left_.data() + pieces_.Begin(p), pieces_.Size(p), bytes,
                                        decoded + pieces_.Begin(p)));
      DAD_RETURN_IF_ERROR(bench_.Copy(pinned.value() + kFlagBytes + pieces_.EncodedBegin(p), bytes,
                                      pieces_.EncodedSize(p)));
    }
    DAD_RETURN_IF_ERROR(bench_.Copy(own_, decoded + pieces_.Begin(group_.rank),
                                    static_cast<size_t>(pieces_.Size(group_.rank)) * sizeof(T)));
    DAD_RETURN_IF_ERROR(
        bench_.Run<cuda::LeftKernel<T>>({left_.data(), decoded, pieces_.count, left_.data()}));
    return Record();
  }

  // Checked here, so that nothing has to be asked of the device later.
  Status Decode(ByteSpan bytes, int piece, bool add, T* to) {
    DAD_RETURN_IF_ERROR(CheckInt8(bytes, pieces_.Size(piece), bucket_));
    DeviceArena work;
    uint8_t* encoded = TakeEncoded(piece, work);
    DAD_RETURN_IF_ERROR(work.status());
    DAD_RETURN_IF_ERROR(Bring(bytes, encoded));
    return bench_.Run<cuda::DequantiseInt8Kernel<T>>(
        {encoded, pieces_.Size(piece), bucket_, add, to});
  }

  Status Reduce(std::span<const ByteSpan> shares) {
    const int64_t count = pieces_.Size(group_.rank);
    const size_t num_bytes = static_cast<size_t>(count) * sizeof(T);
    auto* sum = arena_.Take<T>(bench_, count);
    DAD_RETURN_IF_ERROR(arena_.status());
    DAD_RETURN_IF_ERROR(bench_.Clear(sum, num_bytes));
    for (int r = 0; r < group_.size; ++r) {
      const ByteSpan share = shares[static_cast<size_t>(r)];
      if (group_.Joined(r) || count == 0) continue;
      if (r == group_.rank) {
        if (Finite()) {
          DAD_RETURN_IF_ERROR(
              bench_.Run<cuda::AddKeptKernel<T>>({own_, count, T(1), sum, sum, nullptr}));
        }
      } else if (share[0] != std::byte{0}) {
        any_not_finite_ = true;
      } else {
        DAD_RETURN_IF_ERROR(Decode(share.subspan(1), group_.rank, true, sum));
      }
    }
    // A rank whose piece is empty hears nothing from others; the owners tell it.
    if (step_.mine != nullptr && !Finite()) any_not_finite_ = true;
    const size_t encoded = pieces_.EncodedSize(group_.rank);
    const Result<std::byte*> pinned = sent_.Take(bench_, 1 + encoded);
    if (!pinned.ok()) return pinned.status();
    result_ = pinned.value();
    pinned.value()[0] = static_cast<std::byte>(any_not_finite_ ? 1 : 0);
    output_ = {};
    if (step_.mine != nullptr) {
      DAD_RETURN_IF_ERROR(output_.Take(bench_, step_.mine->output, arena_));
    }
    if (any_not_finite_ || count == 0) {
      if (encoded > 0) std::memset(pinned.value() + 1, 0, encoded);
      return Status::Ok();
    }
    const T weight = spec_.op == ReduceOp::kAverage ? T(1) / static_cast<T>(group_.size) : T(1);
    DAD_RETURN_IF_ERROR(bench_.Run<cuda::AddKeptKernel<T>>(
        {sum, count, weight, feedback_ ? state_->owner_residual.data() : nullptr, sum, nullptr}));
    DeviceArena work;
    uint8_t* bytes = TakeEncoded(group_.rank, work);
    auto* applied = work.Take<T>(bench_, count);
    DAD_RETURN_IF_ERROR(work.status());
    DAD_RETURN_IF_ERROR(QuantisePiece(sum, count, bytes, applied));
    DAD_RETURN_IF_ERROR(bench_.Copy(pinned.value() + 1, bytes, encoded));
    if (step_.mine != nullptr) {
      DAD_RETURN_IF_ERROR(
          bench_.Copy(output_.values() + pieces_.Begin(group_.rank), applied, num_bytes));
    }
    // Both count when the step is over: another owner may still refuse it.
    if (feedback_) {
      DAD_RETURN_IF_ERROR(state_->Take(count, owner_left_));
      DAD_RETURN_IF_ERROR(
          bench_.Run<cuda::LeftKernel<T>>({sum, applied, count, owner_left_.data()}));
      DAD_RETURN_IF_ERROR(state_->Take(count, applied_));
      DAD_RETURN_IF_ERROR(bench_.Copy(applied_.data(), applied, num_bytes));
    }
    return Record();
  }

  Status TakeResults(std::span<const ByteSpan> shares) {
    if (step_.mine == nullptr) return Status::Ok();
    Status decoded;
    for (int p = 0; p < group_.size; ++p) {
      const ByteSpan share = shares[static_cast<size_t>(p)];
      if (p == group_.rank || pieces_.Size(p) == 0) continue;
      if (share[0] != std::byte{0}) {
        any_not_finite_ = true;
      } else if (decoded.ok()) {
        decoded = Decode(share.subspan(1), p, false, output_.values() + pieces_.Begin(p));
        if (!Refusal::Is(decoded)) DAD_RETURN_IF_ERROR(decoded);
      }
    }
    return Refusal::Late(spec_, group_.rank, decoded);
  }

  const int64_t bucket_;
  const bool feedback_;
  Int8Pieces pieces_;
  std::shared_ptr<DeviceInt8State<T>> state_;
  // State of the current step.
  DeviceEvent waited_for_;
  typename DeviceInt8State<T>::Values left_, owner_left_, applied_;
  T* own_ = nullptr;  // what our piece of our own decodes to
  const std::byte* shares_ = nullptr;
  const std::byte* result_ = nullptr;
  DeviceResult<T> output_;
  bool any_not_finite_ = false;
};

}  // namespace

Result<std::unique_ptr<Exchange>> MakeDeviceInt8Exchange(const TensorSpec& spec,
                                                         const ExchangeEnv& env) {
  Result<std::unique_ptr<Exchange>> on_host = MakeInt8Exchange(spec, env);
  if (!on_host.ok()) return on_host.status();
  return MakeForType<DeviceInt8Exchange>(spec, spec.method.Integer("bucket", 512).value(),
                                         spec.method.Integer("feedback", 1).value() != 0, env,
                                         std::move(on_host).value());
}

}  // namespace dad
