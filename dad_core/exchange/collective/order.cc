#include "exchange/collective/order.h"

#include <cstring>
#include <utility>
#include <vector>

#include "exchange/share/shares.h"

namespace dad {
namespace {

constexpr int kFirst = 0;

class OrderExchange final : public Exchange {
 public:
  OrderExchange(const TensorSpec& spec, const ExchangeEnv& env)
      : tells_rows_(spec.kind == OpKind::kAllGather || spec.kind == OpKind::kAllToAll),
        makes_output_(tells_rows_ || spec.kind == OpKind::kReduceScatter),
        next_turn_(env.next_turn) {
    turn_.spec = spec;
  }

  Status Begin(const StepInput& input, const Group& group) override {
    group_ = group;
    step_ = input;
    turn_.rows.clear();
    turn_.output = {};
    turn_.failed = false;
    no_output_ = Status::Ok();
    if (!tells_rows_) return Status::Ok();
    turn_.rows.resize(static_cast<size_t>(group.size));
    return input.mine == nullptr ? Status::Ok() : Outgoing(*input.mine);
  }
  int num_rounds() const override { return 2; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    if (round == 0) {
      if (TellsRows(peer)) out.AppendValue(turn_.rows[static_cast<size_t>(peer)].send_count);
      return Status::Ok();
    }
    if (group_.rank == kFirst) out.AppendValue(turn_.number);
    if (makes_output_) out.AppendValue(static_cast<uint8_t>(no_output_.ok()));
    return Status::Ok();
  }
  bool Speaks(int round, int from, int) const override {
    return round == 0 || from == kFirst || makes_output_;
  }
  int64_t ReceiveBytes(int round, int peer) const override {
    if (round == 0) return TellsRows(peer) ? sizeof(int64_t) : 0;
    return (peer == kFirst ? sizeof turn_.number : 0) + (makes_output_ ? sizeof(uint8_t) : 0);
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r == group_.rank) continue;
      const ByteSpan share = shares[static_cast<size_t>(r)];
      DAD_RETURN_IF_ERROR(CheckShareBytes(turn_.spec, r, share, ReceiveBytes(round, r)));
      DAD_RETURN_IF_ERROR(round == 0 ? HearRows(r, share) : HearOutcome(r, share));
    }
    if (round > 0) return Status::Ok();
    if (group_.rank == kFirst) turn_.number = (*next_turn_)++;
    if (!makes_output_ || step_.mine == nullptr) return Status::Ok();
    no_output_ = MakeOutput();
    turn_.failed = !no_output_.ok();
    return Status::Ok();
  }

  Status Finish() override { return no_output_; }
  const DeviceTurn* device_turn() const override { return &turn_; }

 private:
  bool TellsRows(int peer) const {
    return tells_rows_ && !group_.Joined(peer) && !group_.Joined(group_.rank);
  }

  // A joined rank gets nothing; in an alltoall the rows that were meant for it are left out.
  Status Outgoing(const Contribution& mine) {
    if (turn_.spec.kind == OpKind::kAllGather) {
      const int64_t count = mine.input.shape.empty() ? 1 : mine.input.shape[0];
      for (DeviceTurn::Rows& rows : turn_.rows) rows.send_count = count;
    } else {
      const auto splits = SplitsOf(turn_.spec, mine, group_.size);
      if (!splits.ok()) return splits.status();
      int64_t begin = 0;
      for (size_t r = 0; r < turn_.rows.size(); ++r) {
        turn_.rows[r].send_begin = begin;
        turn_.rows[r].send_count = splits.value()[r];
        begin += splits.value()[r];
      }
    }
    for (int r = 0; r < group_.size; ++r) {
      if (group_.Joined(r)) turn_.rows[static_cast<size_t>(r)].send_count = 0;
    }
    return Status::Ok();
  }

  Status HearRows(int from, ByteSpan share) {
    if (share.empty()) return Status::Ok();
    int64_t& count = turn_.rows[static_cast<size_t>(from)].receive_count;
    std::memcpy(&count, share.data(), sizeof count);
    return CheckNumRows(turn_.spec, from, count);
  }

  Status HearOutcome(int from, ByteSpan share) {
    if (from == kFirst) {
      std::memcpy(&turn_.number, share.data(), sizeof turn_.number);
      share = share.subspan(sizeof turn_.number);
    }
    if (!makes_output_ || share[0] != std::byte{0}) return Status::Ok();
    turn_.failed = true;
    if (no_output_.ok()) {
      no_output_ = Status::Unavailable("\"" + turn_.spec.name + "\": rank " + std::to_string(from) +
                                       " has no memory for its result");
    }
    return Status::Ok();
  }

  Status MakeOutput() {
    const TensorSpec& spec = turn_.spec;
    int64_t num_rows = 0;
    if (tells_rows_) {
      DeviceTurn::Rows& own = turn_.rows[static_cast<size_t>(group_.rank)];
      own.receive_count = own.send_count;
      std::vector<int64_t> received;
      for (DeviceTurn::Rows& rows : turn_.rows) {
        rows.receive_begin = num_rows;
        num_rows += rows.receive_count;
        received.push_back(rows.receive_count);
      }
      if (spec.kind == OpKind::kAllToAll && step_.received_splits != nullptr) {
        *step_.received_splits = std::move(received);
      }
    } else {
      num_rows = RowsOfRank(spec.shape[0], group_.size, group_.rank);
    }
    Result<TensorView> output = step_.allocate(WithRows(spec, num_rows));
    if (!output.ok()) return output.status();
    const TensorView& input = step_.mine->input;
    if (output.value().device != input.device ||
        output.value().device_index != input.device_index) {
      return Status::InvalidArgument("\"" + spec.name + "\": the output is not where the input is");
    }
    turn_.output = std::move(output).value();
    return Status::Ok();
  }

  const bool tells_rows_;
  const bool makes_output_;
  DeviceTurn turn_;
  uint64_t* const next_turn_;
  Group group_;
  StepInput step_;
  Status no_output_;  // why nothing is to be done: this rank's own reason, or whose it is
};

}  // namespace

std::unique_ptr<Exchange> MakeOrderExchange(const TensorSpec& spec, const ExchangeEnv& env) {
  return std::make_unique<OrderExchange>(spec, env);
}

}  // namespace dad
