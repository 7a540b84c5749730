#include "exchange/method/qsgd/qsgd.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "codec/qsgd.h"
#include "exchange/by_method.h"
#include "exchange/method/qsgd/qsgd_state.h"
#include "exchange/share/share_io.h"
#include "exchange/share/shares.h"

namespace dad {
namespace {

template <typename T>
class QsgdExchange final : public Exchange {
 public:
  QsgdExchange(const TensorSpec& spec, int bits, uint64_t seed, const ExchangeEnv& env)
      : spec_(spec), count_(NumElements(spec.shape)), bits_(bits), seed_(seed), env_(env) {}

  Status Begin(const StepInput& input, const Group& group) override {
    if (input.mine != nullptr) DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, true));
    group_ = group;
    step_ = input;
    not_finite_rank_ = -1;
    DAD_RETURN_IF_ERROR(FindState());
    if (input.mine == nullptr) return Status::Ok();
    std::vector<T> values(static_cast<size_t>(count_));
    ConvertTo(input.mine->input, values.data());
    const uint64_t key = QsgdKey(seed_, spec_.name, state_->step, group.rank);
    share_.assign(ShareBytes(), std::byte{0});
    const bool finite =
        EncodeQsgd<T>(values.data(), count_, static_cast<T>(input.mine->scale * spec_.prescale),
                      bits_, key, std::span(share_).subspan(1));
    // The size is known beforehand, so a flagged share is as long as any other.
    if (!finite) share_[0] = std::byte{1};
    return Status::Ok();
  }

  int num_rounds() const override { return 1; }

  Status Send(int, int peer, GatherBuffer& out) override {
    if (Travels(group_.rank, peer)) out.Reference(share_.data(), share_.size());
    return Status::Ok();
  }

  int64_t ReceiveBytes(int, int peer) const override {
    return Travels(peer, group_.rank) ? static_cast<int64_t>(ShareBytes()) : 0;
  }

  Status Receive(int, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r == group_.rank) continue;
      DAD_RETURN_IF_ERROR(
          CheckShareBytes(spec_, r, shares[static_cast<size_t>(r)], ReceiveBytes(0, r)));
    }
    if (step_.mine == nullptr) return Status::Ok();
    sum_.assign(static_cast<size_t>(count_), T(0));
    for (int r = 0; r < group_.size; ++r) {
      if (group_.Joined(r)) continue;
      const ByteSpan share = r == group_.rank ? ByteSpan(share_) : shares[static_cast<size_t>(r)];
      if (share[0] != std::byte{0}) {
        if (not_finite_rank_ < 0) not_finite_rank_ = r;
        continue;
      }
      const Status added = AddQsgd<T>(share.subspan(1), count_, bits_, sum_.data());
      if (!added.ok()) {
        return Status::InvalidArgument("\"" + spec_.name + "\": rank " + std::to_string(r) +
                                       " sent a malformed share: " + added.message());
      }
    }
    return Status::Ok();
  }

  Status Finish() override {
    if (step_.mine == nullptr) return Status::Ok();
    if (step_.report != nullptr) {
      step_.report->not_finite = not_finite_rank_ >= 0;
      step_.report->not_finite_rank = not_finite_rank_;
    }
    if (not_finite_rank_ >= 0) {
      std::fill(sum_.begin(), sum_.end(), std::numeric_limits<T>::quiet_NaN());
    } else {
      ++state_->step;
      const T divisor = spec_.op == ReduceOp::kAverage ? static_cast<T>(group_.size) : T(1);
      const T factor = static_cast<T>(spec_.postscale);
      for (T& value : sum_) value = value / divisor * factor;
    }
    ConvertFrom(sum_.data(), step_.mine->output);
    return Status::Ok();
  }

 private:
  size_t ShareBytes() const { return 1 + QsgdBytes(count_, bits_); }
  bool Travels(int from, int to) const {
    return from != to && !group_.Joined(from) && !group_.Joined(to);
  }

  Status FindState() {
    auto make = [] { return std::make_shared<QsgdState>(); };
    auto found = StateOf<QsgdState>(spec_, env_, make);
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    return Status::Ok();
  }

  const TensorSpec spec_;
  const int64_t count_;
  const int bits_;
  const uint64_t seed_;
  const ExchangeEnv env_;
  Group group_;
  StepInput step_;
  std::shared_ptr<QsgdState> state_;
  std::vector<std::byte> share_;
  std::vector<T> sum_;
  int not_finite_rank_ = -1;
};

}  // namespace

void QsgdState::Export(std::vector<StateTensor>& out) {
  StateTensor tensor{"step", DType::kInt64, {1}, std::vector<std::byte>(sizeof step)};
  std::memcpy(tensor.bytes.data(), &step, sizeof step);
  out.push_back(std::move(tensor));
}

Status QsgdState::Import(const std::vector<StateTensor>& tensors) {
  for (const StateTensor& tensor : tensors) {
    if (tensor.name != "step" || tensor.bytes.size() != sizeof step) {
      return Status::InvalidArgument("a saved " + tensor.name + " is not of qsgd");
    }
    std::memcpy(&step, tensor.bytes.data(), sizeof step);
  }
  return Status::Ok();
}

Result<std::unique_ptr<Exchange>> MakeQsgdExchange(const TensorSpec& spec, const ExchangeEnv& env) {
  auto wrong = [&](const std::string& what) { return WrongMethod(spec, what); };
  DAD_RETURN_IF_ERROR(CheckSummable(spec, "qsgd"));
  const auto bits = spec.method.Integer("bits", 4);
  const auto seed = spec.method.Integer("seed", 0);
  DAD_RETURN_IF_ERROR(bits.status());
  DAD_RETURN_IF_ERROR(seed.status());
  if (bits.value() < 1 || bits.value() > 8) return wrong("bits must be 1 to 8");
  const auto number = static_cast<int>(bits.value());
  const auto key = static_cast<uint64_t>(seed.value());
  return MakeForType<QsgdExchange>(spec, number, key, env);
}

int64_t QsgdShareBytes(const TensorSpec& spec) {
  const auto bits = spec.method.Integer("bits", 4);
  const int known = bits.ok() ? static_cast<int>(bits.value()) : 8;
  return 1 + static_cast<int64_t>(QsgdBytes(NumElements(spec.shape), known));
}

}  // namespace dad
