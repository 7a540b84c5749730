#include "exchange/collective/broadcast.h"

#include <cstring>

#include "exchange/share/shares.h"

namespace dad {
namespace {

class BroadcastExchange final : public Exchange {
 public:
  explicit BroadcastExchange(const TensorSpec& spec)
      : spec_(spec),
        num_bytes_(NumElements(spec.shape) * static_cast<int64_t>(SizeOf(spec.dtype))) {}

  Status Begin(const StepInput& input, const Group& group) override {
    if (spec_.root < 0 || spec_.root >= group.size) {
      return Status::InvalidArgument("\"" + spec_.name + "\": root " + std::to_string(spec_.root) +
                                     " is not one of " + std::to_string(group.size) + " ranks");
    }
    if (group.Joined(spec_.root)) {
      return Status::FailedPrecondition("\"" + spec_.name + "\": root rank " +
                                        std::to_string(spec_.root) + " has joined");
    }
    if (input.mine != nullptr) DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, true));
    group_ = group;
    mine_ = input.mine;
    return Status::Ok();
  }

  int num_rounds() const override { return 1; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    (void)round;
    if (group_.rank == spec_.root && !group_.Joined(peer)) {
      out.Reference(mine_->input.data, static_cast<size_t>(num_bytes_));
    }
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    (void)round;
    return peer == spec_.root && !group_.Joined(group_.rank) ? num_bytes_ : 0;
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r == group_.rank) continue;
      const ByteSpan share = shares[static_cast<size_t>(r)];
      DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, share, ReceiveBytes(round, r)));
      if (!share.empty()) std::memcpy(mine_->output.data, share.data(), share.size());
    }
    if (group_.rank == spec_.root && num_bytes_ > 0 && mine_->output.data != mine_->input.data) {
      std::memcpy(mine_->output.data, mine_->input.data, static_cast<size_t>(num_bytes_));
    }
    return Status::Ok();
  }

  Status Finish() override { return Status::Ok(); }

 private:
  const TensorSpec spec_;
  const int64_t num_bytes_;
  Group group_;
  const Contribution* mine_ = nullptr;
};

}  // namespace

std::unique_ptr<Exchange> MakeBroadcastExchange(const TensorSpec& spec) {
  return std::make_unique<BroadcastExchange>(spec);
}

}  // namespace dad
