#include "exchange/device/qsgd.h"

#include <cstring>
#include <string>
#include <utility>

#include "codec/qsgd.h"
#include "exchange/by_method.h"
#include "exchange/device/device_exchange.h"
#include "exchange/method/qsgd/qsgd.h"
#include "exchange/method/qsgd/qsgd_state.h"
#include "exchange/share/shares.h"

namespace dad {
namespace {

template <typename T>
class DeviceQsgdExchange final : public DeviceExchange {
 public:
  DeviceQsgdExchange(const TensorSpec& spec, int bits, uint64_t seed, const ExchangeEnv& env,
                     std::unique_ptr<Exchange> on_host)
      : DeviceExchange(spec, env, std::move(on_host)),
        count_(NumElements(spec.shape)),
        bits_(bits),
        seed_(seed) {}

  int num_rounds() const override { return 1; }
  Result<DeviceEvent> Ready(int) override {
    return std::exchange(waits_, false) ? event_ : DeviceEvent();
  }

  int64_t ReceiveBytes(int, int peer) const override {
    return Travels(peer, group_.rank) ? QsgdShareBytes(spec_) : 0;
  }

 private:
  void Reset() override {
    not_finite_rank_ = -1;
    waits_ = false;
  }
  // A rank that has joined has nothing to compute.
  bool GoesByHost(const Contribution* mine) const override {
    return mine == nullptr || mine->input.device == DeviceType::kCpu;
  }
  void Refuse(const std::string&) override { refusal_.NoteShort(group_.rank); }
  Result<bool> AnyRefused(int, std::span<const ByteSpan> shares) override {
    if (step_.mine == nullptr) return false;
    for (const ByteSpan share : shares) refusal_.ReadShort(share, group_.size);
    return refusal_.there();
  }

  Status Compute() override {
    DAD_RETURN_IF_ERROR(CheckContribution(spec_, *step_.mine, true));
    auto found = StateOf<QsgdState>(spec_, env_, [] { return std::make_shared<QsgdState>(); });
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    return Encode();
  }

  Status SendShare(int, int peer, GatherBuffer& out) override {
    if (!Travels(group_.rank, peer)) return Status::Ok();
    if (refusal_.there()) {
      refusal_.WriteShort(static_cast<size_t>(QsgdShareBytes(spec_)), out);
      return Status::Ok();
    }
    // The size is known beforehand, so a flagged share is as long as any other.
    out.AppendValue(static_cast<uint8_t>(Finite() ? 0 : 1));
    out.Reference(share_ + kFlagBytes, QsgdBytes(count_, bits_));
    return Status::Ok();
  }

  Status ReceiveShares(int, std::span<const ByteSpan> shares) override {
    // Without the memory for a sum the shares are read all the same: whether the step counts is the
    // matter of all.
    Status added = result_.Take(bench_, step_.mine->output, arena_);
    for (int r = 0; r < group_.size; ++r) {
      const ByteSpan share = shares[static_cast<size_t>(r)];
      if (r != group_.rank) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, share, ReceiveBytes(0, r)));
      }
      if (group_.Joined(r)) continue;
      if (r == group_.rank ? !Finite() : share[0] != std::byte{0}) {
        if (not_finite_rank_ < 0) not_finite_rank_ = r;
      } else if (added.ok()) {
        const Status status = r == group_.rank ? Add(own_) : AddShare(r, share.subspan(1));
        if (!Refusal::Is(status)) DAD_RETURN_IF_ERROR(status);
        added = status;
      }
    }
    return Refusal::Late(spec_, group_.rank, added);
  }

  Status Deliver() override {
    const bool nothing = not_finite_rank_ >= 0;
    if (step_.report != nullptr) {
      step_.report->not_finite = nothing;
      step_.report->not_finite_rank = not_finite_rank_;
    }
    const T divisor = spec_.op == ReduceOp::kAverage ? static_cast<T>(group_.size) : T(1);
    DAD_RETURN_IF_ERROR(result_.Deliver(bench_, divisor, static_cast<T>(spec_.postscale), nothing));
    if (!nothing) ++state_->step;
    return Status::Ok();
  }

  static constexpr size_t kFlagBytes = 16;  // before the codes: not finite, an int

  bool Travels(int from, int to) const {
    return from != to && !group_.Joined(from) && !group_.Joined(to);
  }
  bool Finite() const {
    int not_finite = 0;
    std::memcpy(&not_finite, share_, sizeof not_finite);
    return not_finite == 0;
  }

  Status Encode() {
    const auto input = ValuesOf<T>(bench_, step_.mine->input, arena_);
    if (!input.ok()) return input.status();
    const size_t num_bytes = QsgdBytes(count_, bits_);
    own_ = arena_.Take<uint8_t>(bench_, static_cast<int64_t>(num_bytes));
    auto* not_finite = arena_.Take<int>(bench_, 1);
    DAD_RETURN_IF_ERROR(arena_.status());
    const Result<std::byte*> pinned = sent_.Take(bench_, kFlagBytes + num_bytes);
    if (!pinned.ok()) return pinned.status();
    share_ = pinned.value();
    DAD_RETURN_IF_ERROR(bench_.Clear(not_finite, sizeof *not_finite));
    // What is not finite has no codes: the bytes travel all the same.
    DAD_RETURN_IF_ERROR(bench_.Clear(own_, num_bytes));
    DAD_RETURN_IF_ERROR(bench_.Run<cuda::EncodeQsgdKernel<T>>(
        {input.value(), count_, static_cast<T>(step_.mine->scale * spec_.prescale), bits_,
         QsgdKey(seed_, spec_.name, state_->step, group_.rank), own_, not_finite}));
    DAD_RETURN_IF_ERROR(bench_.Copy(pinned.value(), not_finite, sizeof *not_finite));
    DAD_RETURN_IF_ERROR(bench_.Copy(pinned.value() + kFlagBytes, own_, num_bytes));
    waits_ = true;
    return Record();
  }

  Status Add(const uint8_t* encoded) {
    return bench_.Run<cuda::AddQsgdKernel<T>>({encoded, count_, bits_, result_.values()});
  }

  // Checked here, so that nothing has to be asked of the device later.
  Status AddShare(int rank, ByteSpan bytes) {
    if (const Status status = CheckQsgd(bytes, count_, bits_); !status.ok()) {
      return Malformed(rank, "a malformed share: " + status.message());
    }
    DeviceArena work;
    auto* encoded = work.Take<uint8_t>(bench_, static_cast<int64_t>(bytes.size()));
    DAD_RETURN_IF_ERROR(work.status());
    DAD_RETURN_IF_ERROR(Bring(bytes, encoded));
    return Add(encoded);
  }

  const int64_t count_;
  const int bits_;
  const uint64_t seed_;
  std::shared_ptr<QsgdState> state_;
  // State of the current step.
  bool waits_ = false;  // the event is still to be told
  uint8_t* own_ = nullptr;
  const std::byte* share_ = nullptr;
  DeviceResult<T> result_;
  int not_finite_rank_ = -1;
};

}  // namespace

Result<std::unique_ptr<Exchange>> MakeDeviceQsgdExchange(const TensorSpec& spec,
                                                         const ExchangeEnv& env) {
  Result<std::unique_ptr<Exchange>> on_host = MakeQsgdExchange(spec, env);
  if (!on_host.ok()) return on_host.status();
  return MakeForType<DeviceQsgdExchange>(
      spec, static_cast<int>(spec.method.Integer("bits", 4).value()),
      static_cast<uint64_t>(spec.method.Integer("seed", 0).value()), env,
      std::move(on_host).value());
}

}  // namespace dad
