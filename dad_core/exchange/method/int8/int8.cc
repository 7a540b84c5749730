#include "exchange/method/int8/int8.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "codec/int_quantise.h"
#include "exchange/by_method.h"
#include "exchange/feedback/state_store.h"
#include "exchange/method/int8/int8_state.h"
#include "exchange/share/share_io.h"
#include "exchange/share/shares.h"

namespace dad {
namespace {

template <typename T>
class Int8Exchange final : public Exchange {
 public:
  Int8Exchange(const TensorSpec& spec, int64_t bucket, bool feedback, const ExchangeEnv& env)
      : spec_(spec),
        count_(NumElements(spec.shape)),
        bucket_(bucket),
        feedback_(feedback),
        env_(env) {}

  Status Begin(const StepInput& input, const Group& group) override {
    if (input.mine != nullptr) DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, true));
    group_ = group;
    step_ = input;
    any_not_finite_ = false;
    not_finite_rank_ = -1;
    DAD_RETURN_IF_ERROR(FindState());
    state_->applied.clear();
    if (input.mine == nullptr || state_->submit_id == input.submit_id) return Status::Ok();
    state_->submit_id = input.submit_id;
    Quantise();
    return Status::Ok();
  }

  int num_rounds() const override { return 2; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    if (ReceiveBytesFrom(round, group_.rank, peer) == 0) return Status::Ok();
    if (round == 1) {
      out.Reference(result_.data(), result_.size());
      return Status::Ok();
    }
    // The size is known beforehand, so a flagged piece is as long as any other.
    out.AppendValue(static_cast<uint8_t>(state_->finite ? 0 : 1));
    out.Reference(state_->bytes.data() + EncodedBegin(peer), EncodedSize(peer));
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    return ReceiveBytesFrom(round, peer, group_.rank);
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r == group_.rank) continue;
      DAD_RETURN_IF_ERROR(
          CheckShareBytes(spec_, r, shares[static_cast<size_t>(r)], ReceiveBytes(round, r)));
    }
    return round == 0 ? Reduce(shares) : TakeResults(shares);
  }

  Status Finish() override {
    if (!any_not_finite_) {
      state_->owner.Commit();
      if (feedback_) state_->applied = std::move(applied_);
    }
    if (step_.mine == nullptr) return Status::Ok();
    if (step_.report != nullptr) {
      step_.report->not_finite = any_not_finite_;
      step_.report->not_finite_rank = state_->finite ? not_finite_rank_ : group_.rank;
    }
    if (any_not_finite_) {
      std::fill(output_.begin(), output_.end(), std::numeric_limits<T>::quiet_NaN());
    } else {
      state_->rank.Commit();
    }
    state_->submit_id = 0;
    ConvertFrom(output_.data(), step_.mine->output);
    return Status::Ok();
  }

 private:
  Int8Pieces Pieces() const { return {count_, bucket_, group_.size}; }
  int64_t PieceBegin(int p) const { return Pieces().Begin(p); }
  int64_t PieceSize(int p) const { return Pieces().Size(p); }
  size_t EncodedSize(int p) const { return Pieces().EncodedSize(p); }
  size_t EncodedBegin(int p) const { return Pieces().EncodedBegin(p); }

  int64_t ReceiveBytesFrom(int round, int from, int to) const {
    return Pieces().MessageBytes(round, from, to, group_);
  }

  Status FindState() {
    auto make = [] { return std::make_shared<Int8State<T>>(); };
    auto found = StateOf<Int8State<T>>(spec_, env_, make);
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    Status fits = state_->rank.Fit(count_, feedback_);
    if (fits.ok()) fits = state_->owner.Fit(PieceSize(group_.rank), feedback_);
    if (fits.ok()) return fits;
    return Status::InvalidArgument("\"" + spec_.name + "\": " + fits.message());
  }

  void Quantise() {
    const std::span<T> work = state_->rank.Values();
    ConvertTo(step_.mine->input, work.data());
    state_->rank.Add(static_cast<T>(step_.mine->scale * spec_.prescale));
    T poison = 0;
    for (T value : work) poison += value * T(0);
    state_->finite = poison == T(0);
    state_->bytes.assign(EncodedBegin(group_.size), std::byte{0});
    if (!state_->finite) return;
    std::vector<T> decoded(work.size());
    for (int p = 0; p < group_.size; ++p) {
      QuantiseInt8<T>(work.data() + PieceBegin(p), PieceSize(p), bucket_,
                      std::span(state_->bytes).subspan(EncodedBegin(p), EncodedSize(p)),
                      decoded.data() + PieceBegin(p));
    }
    own_piece_.assign(decoded.begin() + PieceBegin(group_.rank),
                      decoded.begin() + PieceBegin(group_.rank + 1));
    state_->rank.Leave(decoded);
  }

  Status Reduce(std::span<const ByteSpan> shares) {
    const int64_t count = PieceSize(group_.rank);
    const std::span<T> sum = state_->owner.Values();
    std::fill(sum.begin(), sum.end(), T(0));
    for (int r = 0; r < group_.size; ++r) {
      const ByteSpan share = shares[static_cast<size_t>(r)];
      if (group_.Joined(r) || count == 0) continue;
      if (r == group_.rank) {
        any_not_finite_ = any_not_finite_ || !state_->finite;
        if (state_->finite) AddOwnPiece(sum);
      } else if (share[0] != std::byte{0}) {
        any_not_finite_ = true;
        if (not_finite_rank_ < 0) not_finite_rank_ = r;
      } else {
        DAD_RETURN_IF_ERROR(AddDequantisedInt8<T>(share.subspan(1), count, bucket_, sum.data()));
      }
    }
    // A rank whose piece is empty hears nothing from others; the owners tell it.
    if (step_.mine != nullptr && !state_->finite) any_not_finite_ = true;
    result_.assign(1 + EncodedSize(group_.rank), std::byte{0});
    output_.resize(static_cast<size_t>(count_));
    if (any_not_finite_) {
      result_[0] = std::byte{1};
      return Status::Ok();
    }
    const T weight = spec_.op == ReduceOp::kAverage ? T(1) / static_cast<T>(group_.size) : T(1);
    state_->owner.Add(weight);
    T* applied = output_.data() + PieceBegin(group_.rank);
    QuantiseInt8<T>(sum.data(), count, bucket_, std::span(result_).subspan(1), applied);
    // Both count when the step is over: on devices an owner may still refuse it.
    applied_.assign(applied, applied + count);
    state_->owner.Leave(applied_);
    Scale(applied, count);
    return Status::Ok();
  }

  // What our own bytes decode to: a step begun again has them no more.
  void AddOwnPiece(std::span<T> sum) {
    if (own_piece_.size() != sum.size()) {
      own_piece_.resize(sum.size());
      const std::span<const std::byte> bytes =
          std::span<const std::byte>(state_->bytes)
              .subspan(EncodedBegin(group_.rank), EncodedSize(group_.rank));
      (void)DequantiseInt8<T>(bytes, static_cast<int64_t>(sum.size()), bucket_, own_piece_.data());
    }
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += own_piece_[i];
    own_piece_.clear();
  }

  void Scale(T* values, int64_t count) const {
    if (spec_.postscale == 1.0) return;
    for (int64_t i = 0; i < count; ++i) values[i] *= static_cast<T>(spec_.postscale);
  }

  Status TakeResults(std::span<const ByteSpan> shares) {
    if (step_.mine == nullptr) return Status::Ok();
    for (int p = 0; p < group_.size; ++p) {
      const ByteSpan share = shares[static_cast<size_t>(p)];
      if (p == group_.rank || PieceSize(p) == 0) continue;
      if (share[0] != std::byte{0}) {
        any_not_finite_ = true;
        continue;
      }
      T* to = output_.data() + PieceBegin(p);
      DAD_RETURN_IF_ERROR(DequantiseInt8<T>(share.subspan(1), PieceSize(p), bucket_, to));
      Scale(to, PieceSize(p));
    }
    return Status::Ok();
  }

  const TensorSpec spec_;
  const int64_t count_;
  const int64_t bucket_;
  const bool feedback_;
  const ExchangeEnv env_;
  Group group_;
  StepInput step_;
  std::shared_ptr<Int8State<T>> state_;
  std::vector<T> own_piece_;
  std::vector<T> applied_;
  std::vector<std::byte> result_;
  std::vector<T> output_;
  bool any_not_finite_ = false;
  int not_finite_rank_ = -1;  // the first whose piece came here
};

}  // namespace

Result<std::unique_ptr<Exchange>> MakeInt8Exchange(const TensorSpec& spec, const ExchangeEnv& env) {
  auto wrong = [&](const std::string& what) { return WrongMethod(spec, what); };
  DAD_RETURN_IF_ERROR(CheckSummable(spec, "int8"));
  const auto bucket = spec.method.Integer("bucket", 512);
  const auto feedback = spec.method.Integer("feedback", 1);
  DAD_RETURN_IF_ERROR(bucket.status());
  DAD_RETURN_IF_ERROR(feedback.status());
  if (bucket.value() < 1) return wrong("bucket must be 1 or more");
  return MakeForType<Int8Exchange>(spec, bucket.value(), feedback.value() != 0, env);
}

int64_t Int8ShareBytes(const TensorSpec& spec) { return NumElements(spec.shape); }

}  // namespace dad
