#include "exchange/collective/all_to_all.h"

#include <cstring>
#include <utility>
#include <vector>

#include "exchange/share/shares.h"

namespace dad {
namespace {

class AllToAllExchange final : public Exchange {
 public:
  explicit AllToAllExchange(const TensorSpec& spec) : spec_(spec), row_bytes_(RowBytes(spec)) {}

  Status Begin(const StepInput& input, const Group& group) override {
    std::vector<Rows> outgoing(static_cast<size_t>(group.size));
    if (input.mine != nullptr) {
      DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, false));
      DAD_RETURN_IF_ERROR(Split(*input.mine, outgoing));
    }
    group_ = group;
    step_ = input;
    outgoing_ = std::move(outgoing);
    return Status::Ok();
  }

  int num_rounds() const override { return 1; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    (void)round;
    if (step_.mine != nullptr && !group_.Joined(peer)) {
      AppendRows(outgoing_[static_cast<size_t>(peer)], out);
    }
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    (void)round;
    return group_.Joined(peer) || group_.Joined(group_.rank) ? 0 : -1;
  }

  bool SendsLength(int round, int peer) const override { return ReceiveBytes(round, peer) < 0; }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    std::vector<Rows> incoming(static_cast<size_t>(group_.size));
    int64_t num_rows = 0;
    for (int r = 0; r < group_.size; ++r) {
      const size_t i = static_cast<size_t>(r);
      if (r == group_.rank) {
        incoming[i] = outgoing_[i];
      } else if (ReceiveBytes(round, r) == 0) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[i], 0));
      } else {
        Result<Rows> rows = ParseRows(spec_, r, shares[i], row_bytes_);
        if (!rows.ok()) return rows.status();
        incoming[i] = rows.value();
      }
      num_rows += incoming[i].count;
    }
    if (step_.mine == nullptr) return Status::Ok();
    Result<TensorView> output = step_.allocate(WithRows(spec_, num_rows));
    if (!output.ok()) return output.status();
    std::byte* to = output.value().bytes();
    if (step_.received_splits != nullptr) step_.received_splits->clear();
    for (const Rows& rows : incoming) {
      if (step_.received_splits != nullptr) step_.received_splits->push_back(rows.count);
      if (rows.bytes.empty()) continue;
      std::memcpy(to, rows.bytes.data(), rows.bytes.size());
      to += rows.bytes.size();
    }
    return Status::Ok();
  }

  Status Finish() override { return Status::Ok(); }

 private:
  // Fills `outgoing`, one per rank, with the rows of `mine` that go there.
  Status Split(const Contribution& mine, std::vector<Rows>& outgoing) const {
    const auto splits = SplitsOf(spec_, mine, static_cast<int>(outgoing.size()));
    if (!splits.ok()) return splits.status();
    const std::byte* from = mine.input.bytes();
    for (size_t r = 0; r < outgoing.size(); ++r) {
      const auto num_bytes = static_cast<size_t>(splits.value()[r] * row_bytes_);
      outgoing[r] = {splits.value()[r], {from, num_bytes}};
      from += num_bytes;
    }
    return Status::Ok();
  }

  const TensorSpec spec_;
  const int64_t row_bytes_;
  Group group_;
  StepInput step_;
  std::vector<Rows> outgoing_;
};

}  // namespace

std::unique_ptr<Exchange> MakeAllToAllExchange(const TensorSpec& spec) {
  return std::make_unique<AllToAllExchange>(spec);
}

}  // namespace dad
