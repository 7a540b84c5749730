#include "exchange/device/int8.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "codec/int_quantise.h"
#include "exchange/by_method.h"
#include "exchange/device/refusal.h"
#include "exchange/device/transfer.h"
#include "exchange/method/int8/int8.h"
#include "exchange/method/int8/int8_state.h"
#include "exchange/share/shares.h"
#include "util/log.h"

namespace dad {
namespace {

// In device memory what Int8State has on the host; checkpoints have the same tensors.
template <typename T>
class DeviceInt8State final : public ExchangeState {
 public:
  explicit DeviceInt8State(std::shared_ptr<DeviceBench> bench) : bench_(std::move(bench)) {}

  void Export(std::vector<StateTensor>& out) override {
    Save("rank_residual", residual, out);
    Save("owner_residual", owner_residual, out);
  }
  Status Import(const std::vector<StateTensor>& tensors) override {
    for (const StateTensor& tensor : tensors) {
      const int64_t count = NumElements(tensor.shape);
      if (tensor.dtype != DTypeOf<T>() ||
          tensor.bytes.size() != static_cast<size_t>(count) * sizeof(T)) {
        return Status::InvalidArgument("a saved " + tensor.name + " has another type");
      }
      Values& values = tensor.name == "rank_residual" ? residual : owner_residual;
      DAD_RETURN_IF_ERROR(Take(count, values));
      DAD_RETURN_IF_ERROR(Upload(*bench_, tensor.bytes, values.block.get()));
    }
    return Status::Ok();
  }
  void ReturnLast() override {
    const Values last = std::exchange(applied, {});
    if (last.count != owner_residual.count || last.count == 0) return;
    const Status status = bench_->Run<cuda::AddKeptKernel<T>>(
        {last.data(), last.count, T(1), owner_residual.data(), owner_residual.data(), nullptr});
    if (!status.ok()) {
      DAD_LOG(Error) << "a residual is lost: " << status.message();
    }
  }

  struct Values {
    int64_t count = 0;
    DeviceBlock block;
    T* data() const { return reinterpret_cast<T*>(block.get()); }
  };
  Status Take(int64_t count, Values& values) {
    Result<DeviceBlock> block = bench_->Take(static_cast<size_t>(count) * sizeof(T));
    if (!block.ok()) return block.status();
    values = {count, std::move(block).value()};
    return Status::Ok();
  }
  // Zeros, unless there is something.
  Status MakeRoom(int64_t count, Values& values) {
    if (values.block != nullptr || count == 0) return Status::Ok();
    DAD_RETURN_IF_ERROR(Take(count, values));
    return bench_->Clear(values.block.get(), static_cast<size_t>(count) * sizeof(T));
  }

  Values residual;
  Values owner_residual;  // of this rank's piece
  Values applied;         // M of this rank's piece in the last step

 private:
  void Save(const char* name, const Values& values, std::vector<StateTensor>& out) const {
    if (values.count == 0) return;
    StateTensor tensor{name, DTypeOf<T>(), {values.count}, {}};
    tensor.bytes.resize(static_cast<size_t>(values.count) * sizeof(T));
    const Status status = FetchNow(*bench_, values.block.get(), tensor.bytes);
    if (status.ok()) {
      out.push_back(std::move(tensor));
    } else {
      DAD_LOG(Error) << "a " << name << " is not saved: " << status.message();
    }
  }

  const std::shared_ptr<DeviceBench> bench_;
};

template <typename T>
class DeviceInt8Exchange final : public Exchange {
 public:
  DeviceInt8Exchange(const TensorSpec& spec, int64_t bucket, bool feedback, const ExchangeEnv& env,
                     std::unique_ptr<Exchange> on_host)
      : spec_(spec),
        bucket_(bucket),
        feedback_(feedback),
        env_(env),
        bench_(*env.bench),
        on_host_(std::move(on_host)) {}
  ~DeviceInt8Exchange() override {
    Release();
    sent_.ReleaseAfter(bench_, event_);
  }

  Status Begin(const StepInput& input, const Group& group) override {
    group_ = group;
    step_ = input;
    pieces_ = {NumElements(spec_.shape), bucket_, group.size};
    any_not_finite_ = false;
    waited_for_ = nullptr;
    refusal_.Clear();
    sent_.ReleaseAfter(bench_, std::exchange(event_, nullptr));
    by_host_ = input.mine != nullptr && input.mine->input.device == DeviceType::kCpu;
    if (by_host_) {
      MoveState<DeviceInt8State<T>>(spec_, env_);
      return on_host_->Begin(input, group);
    }
    if (input.mine != nullptr) DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, true));
    DAD_RETURN_IF_ERROR(bench_.Open());
    return OrRefuse(FindAndQuantise());
  }

  int num_rounds() const override { return 2; }
  int device() const override { return by_host_ ? -1 : bench_.device(); }
  DeviceEvent device_event() const override { return event_; }
  // What the step has recorded last is what the bytes of the round wait for.
  Result<DeviceEvent> Ready(int) override {
    if (event_ == waited_for_) return DeviceEvent();
    waited_for_ = event_;
    return event_;
  }

  Status Send(int round, int peer, GatherBuffer& out) override {
    const int64_t bytes = pieces_.MessageBytes(round, group_.rank, peer, group_);
    if (refusal_.there()) {
      if (bytes > 0) refusal_.Write(static_cast<size_t>(bytes), out);
      return Status::Ok();
    }
    if (by_host_) return on_host_->Send(round, peer, out);
    if (bytes == 0) return Status::Ok();
    if (round == 1) {
      out.Reference(result_, static_cast<size_t>(bytes));
      return Status::Ok();
    }
    // The size is known beforehand, so a flagged piece is as long as any other.
    out.AppendValue(static_cast<uint8_t>(Finite() ? 0 : 1));
    out.Reference(shares_ + kFlagBytes + pieces_.EncodedBegin(peer), pieces_.EncodedSize(peer));
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    return pieces_.MessageBytes(round, peer, group_.rank, group_);
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r == group_.rank) continue;
      const ByteSpan share = shares[static_cast<size_t>(r)];
      DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, share, ReceiveBytes(round, r)));
      refusal_.Read(share, group_.size);
    }
    // Owners hear of it from those who refuse, all others from the owners.
    if (refusal_.there()) return Status::Ok();
    if (by_host_) return on_host_->Receive(round, shares);
    return round == 0 ? OrRefuse(Reduce(shares)) : TakeResults(shares);
  }

  Status Finish() override {
    if (refusal_.there()) {
      if (!by_host_) Release();
      return refusal_.status(spec_);
    }
    if (by_host_) return on_host_->Finish();
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
    DAD_RETURN_IF_ERROR(Record());
    Release();
    return Status::Ok();
  }

  void Cancel() override {
    if (by_host_) return on_host_->Cancel();
    Release();
  }

 private:
  static constexpr size_t kFlagBytes = 16;  // before the pieces: not finite, an int

  bool Finite() const {
    int not_finite = 0;
    std::memcpy(&not_finite, shares_, sizeof not_finite);
    return not_finite == 0;
  }

  // What this rank has not the memory for it says in its messages; the step goes on without it.
  Status OrRefuse(const Status& status) {
    if (status.ok() || !Refusal::Is(status)) return status;
    refusal_.Note(group_.rank);
    return Record();
  }

  Status FindAndQuantise() {
    DAD_RETURN_IF_ERROR(FindState());
    state_->applied = {};
    return step_.mine == nullptr ? Status::Ok() : Quantise();
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
    const Result<std::byte*> pinned = pinned_.Take(bench_, bytes.size());
    if (!pinned.ok()) return pinned.status();
    std::memcpy(pinned.value(), bytes.data(), bytes.size());
    DAD_RETURN_IF_ERROR(bench_.Copy(encoded, pinned.value(), bytes.size()));
    return bench_.Run<cuda::DequantiseInt8Kernel<T>>(
        {encoded, pieces_.Size(piece), bucket_, add, nullptr, to});
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
    left_ = owner_left_ = applied_ = {};
  }

  const TensorSpec spec_;
  const int64_t bucket_;
  const bool feedback_;
  const ExchangeEnv env_;
  DeviceBench& bench_;
  const std::unique_ptr<Exchange> on_host_;
  Group group_;
  StepInput step_;
  Int8Pieces pieces_;
  bool by_host_ = false;
  std::shared_ptr<DeviceInt8State<T>> state_;
  // Of the step.
  DeviceEvent event_;
  DeviceEvent waited_for_;
  DeviceArena arena_;
  PinnedKeep pinned_;
  PinnedKeep sent_;  // until the next step: it may be on its way for that long
  ShortRefusal refusal_;
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
