#include "exchange/collective/reduce_scatter.h"

#include <algorithm>
#include <vector>

#include "exchange/share/shares.h"
#include "linalg/reduce.h"

namespace dad {
namespace {

class ReduceScatterExchange final : public Exchange {
 public:
  explicit ReduceScatterExchange(const TensorSpec& spec)
      : spec_(spec), row_bytes_(RowBytes(spec)) {}

  Status Begin(const StepInput& input, const Group& group) override {
    if (input.mine != nullptr) {
      DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, false));
      if (input.mine->input.shape != spec_.shape) {
        return Status::InvalidArgument("\"" + spec_.name + "\": input has shape " +
                                       ToString(input.mine->input.shape) + ", expected " +
                                       ToString(spec_.shape));
      }
    }
    group_ = group;
    step_ = input;
    return Status::Ok();
  }

  int num_rounds() const override { return 1; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    (void)round;
    if (step_.mine != nullptr && !group_.Joined(peer)) {
      out.Reference(MyValuesFor(peer), static_cast<size_t>(RowsOf(peer) * row_bytes_));
    }
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    (void)round;
    const bool nothing = group_.Joined(peer) || group_.Joined(group_.rank);
    return nothing ? 0 : RowsOf(group_.rank) * row_bytes_;
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    std::vector<const void*> inputs(static_cast<size_t>(group_.size), nullptr);
    for (int r = 0; r < group_.size; ++r) {
      const size_t i = static_cast<size_t>(r);
      if (r == group_.rank) {
        inputs[i] = step_.mine == nullptr ? nullptr : MyValuesFor(r);
        continue;
      }
      DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[i], ReceiveBytes(round, r)));
      if (!shares[i].empty()) inputs[i] = shares[i].data();
    }
    if (step_.mine == nullptr) return Status::Ok();
    Result<TensorView> output = step_.allocate(WithRows(spec_, RowsOf(group_.rank)));
    if (!output.ok()) return output.status();
    ReduceInRankOrder(inputs, output.value().data, output.value().num_elements(), spec_.dtype,
                      spec_.op, spec_.prescale, spec_.postscale, group_.size);
    return Status::Ok();
  }

  Status Finish() override { return Status::Ok(); }

 private:
  int64_t RowsOf(int p) const { return RowsOfRank(spec_.shape[0], group_.size, p); }
  const std::byte* MyValuesFor(int p) const {
    const int64_t even = spec_.shape[0] / group_.size;
    const int64_t remainder = spec_.shape[0] % group_.size;
    const int64_t first_row = even * p + std::min<int64_t>(p, remainder);
    return step_.mine->input.bytes() + first_row * row_bytes_;
  }

  const TensorSpec spec_;
  const int64_t row_bytes_;
  Group group_;
  StepInput step_;
};

}  // namespace

std::unique_ptr<Exchange> MakeReduceScatterExchange(const TensorSpec& spec) {
  return std::make_unique<ReduceScatterExchange>(spec);
}

}  // namespace dad
