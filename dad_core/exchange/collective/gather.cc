#include "exchange/collective/gather.h"

#include <cstring>
#include <vector>

#include "exchange/share/shares.h"

namespace dad {
namespace {

class GatherExchange final : public Exchange {
 public:
  explicit GatherExchange(const TensorSpec& spec) : spec_(spec), row_bytes_(RowBytes(spec)) {}

  Status Begin(const StepInput& input, const Group& group) override {
    if (input.mine != nullptr) DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, false));
    group_ = group;
    step_ = input;
    mine_ = {};
    if (input.mine != nullptr) {
      const TensorView& view = input.mine->input;
      mine_ = {view.shape.empty() ? 1 : view.shape[0], {view.bytes(), view.num_bytes()}};
    }
    return Status::Ok();
  }

  int num_rounds() const override { return 1; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    (void)round;
    if (step_.mine != nullptr && !group_.Joined(peer)) AppendRows(mine_, out);
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    (void)round;
    return group_.Joined(peer) || group_.Joined(group_.rank) ? 0 : -1;
  }

  bool SendsLength(int round, int peer) const override { return ReceiveBytes(round, peer) < 0; }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    std::vector<Rows> all(static_cast<size_t>(group_.size));
    int64_t num_rows = 0;
    for (int r = 0; r < group_.size; ++r) {
      const size_t i = static_cast<size_t>(r);
      if (r == group_.rank) {
        all[i] = mine_;
      } else if (ReceiveBytes(round, r) == 0) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[i], 0));
      } else {
        Result<Rows> rows = ParseRows(spec_, r, shares[i], row_bytes_);
        if (!rows.ok()) return rows.status();
        all[i] = rows.value();
      }
      num_rows += all[i].count;
    }
    if (step_.mine == nullptr) return Status::Ok();
    Result<TensorView> output = step_.allocate(WithRows(spec_, num_rows));
    if (!output.ok()) return output.status();
    std::byte* to = output.value().bytes();
    for (const Rows& rows : all) {
      if (rows.bytes.empty()) continue;
      std::memcpy(to, rows.bytes.data(), rows.bytes.size());
      to += rows.bytes.size();
    }
    return Status::Ok();
  }

  Status Finish() override { return Status::Ok(); }

 private:
  const TensorSpec spec_;
  const int64_t row_bytes_;
  Group group_;
  StepInput step_;
  Rows mine_;
};

}  // namespace

std::unique_ptr<Exchange> MakeGatherExchange(const TensorSpec& spec) {
  return std::make_unique<GatherExchange>(spec);
}

}  // namespace dad
