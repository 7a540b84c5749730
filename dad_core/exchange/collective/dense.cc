#include "exchange/collective/dense.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "exchange/collective/owner_pieces.h"
#include "exchange/share/shares.h"
#include "linalg/reduce.h"

namespace dad {
namespace {

// `report` may be null.
void Reduce(const TensorSpec& spec, std::span<const void* const> inputs, void* out, int64_t count,
            int group_size, StepReport* report) {
  const bool finite = ReduceInRankOrder(inputs, out, count, spec.dtype, spec.op, spec.prescale,
                                        spec.postscale, group_size);
  if (!finite && report != nullptr && report->suspect < 0) {
    report->suspect = FirstNotFinite(inputs, out, count, spec.dtype);
  }
}

class OwnerDenseExchange final : public Exchange {
 public:
  OwnerDenseExchange(const TensorSpec& spec, Slice slice, bool pack)
      : spec_(spec), pieces_(spec_, slice, pack) {}

  Status Begin(const StepInput& input, const Group& group) override {
    report_ = input.report;
    return pieces_.Begin(input, group);
  }

  int num_rounds() const override { return pieces_.group().size == 1 ? 1 : 2; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    if (round == 0) {
      pieces_.SendContribution(peer, out);
    } else {
      pieces_.SendResult(out);
    }
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    return round == 0 ? pieces_.ContributionBytes(peer) : pieces_.ResultBytes(peer);
  }

  bool SendsLength(int round, int peer) const override {
    return round == 0 ? pieces_.ContributionSaysLength(peer) : pieces_.Packs(pieces_.group().rank);
  }

  std::span<std::byte> Destination(int round, int peer) override {
    return round == 0 ? std::span<std::byte>{} : pieces_.ResultDestination(peer);
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    if (round == 1) return pieces_.TakeResults(shares);
    const auto contributions = pieces_.TakeContributions(shares);
    if (!contributions.ok()) return contributions.status();
    ReduceOwnPiece(contributions.value());
    return Status::Ok();
  }

  Status Finish() override { return Status::Ok(); }

 private:
  void ReduceOwnPiece(std::span<const void* const> contributions) {
    const std::span<std::byte> output = pieces_.OwnOutput();
    if (pieces_.group().size == 1) {  // nobody to send it to
      if (!output.empty()) {
        Reduce(spec_, contributions, output.data(), pieces_.own_count(), 1, report_);
      }
      return;
    }
    const std::span<std::byte> result = pieces_.OwnResult();
    // In blocks, so that the copy into the output reads from the cache.
    constexpr size_t kBlockBytes = 64 << 10;
    const size_t element_bytes = SizeOf(spec_.dtype);
    std::vector<const void*> inputs(contributions.size());
    for (size_t begin = 0; begin < result.size(); begin += kBlockBytes) {
      const size_t num_bytes = std::min(kBlockBytes, result.size() - begin);
      for (size_t r = 0; r < inputs.size(); ++r) {
        const auto* all = static_cast<const std::byte*>(contributions[r]);
        inputs[r] = all == nullptr ? nullptr : all + begin;
      }
      Reduce(spec_, inputs, result.data() + begin, static_cast<int64_t>(num_bytes / element_bytes),
             pieces_.group().size, report_);
      if (!output.empty() && output.data() != result.data()) {
        std::memcpy(output.data() + begin, result.data() + begin, num_bytes);
      }
    }
    pieces_.ResultIsThere();
  }

  const TensorSpec spec_;
  OwnerPieces pieces_;
  StepReport* report_ = nullptr;
};

class DirectDenseExchange final : public Exchange {
 public:
  DirectDenseExchange(const TensorSpec& spec, Slice slice)
      : spec_(spec),
        slice_(slice),
        num_bytes_(static_cast<size_t>(slice.count) * SizeOf(spec.dtype)) {}

  Status Begin(const StepInput& input, const Group& group) override {
    if (input.mine != nullptr) DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, true));
    group_ = group;
    report_ = input.report;
    const bool has_elements = input.mine != nullptr && slice_.count > 0;
    const int64_t offset = slice_.begin * static_cast<int64_t>(SizeOf(spec_.dtype));
    input_ = has_elements ? input.mine->input.bytes() + offset : nullptr;
    output_ = has_elements ? input.mine->output.bytes() + offset : nullptr;
    return Status::Ok();
  }

  int num_rounds() const override { return 1; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    (void)round, (void)peer;
    // Copied: the result may be in place and is written while these bytes are under way.
    if (input_ != nullptr && !group_.Joined(peer)) out.Append(input_, num_bytes_);
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    (void)round;
    const bool nothing = group_.Joined(peer) || group_.Joined(group_.rank);
    return nothing ? 0 : static_cast<int64_t>(num_bytes_);
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    std::vector<const void*> inputs(static_cast<size_t>(group_.size), nullptr);
    for (int r = 0; r < group_.size; ++r) {
      const size_t i = static_cast<size_t>(r);
      if (r == group_.rank) {
        inputs[i] = input_;
        continue;
      }
      DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[i], ReceiveBytes(round, r)));
      if (!shares[i].empty()) inputs[i] = shares[i].data();
    }
    if (output_ != nullptr) Reduce(spec_, inputs, output_, slice_.count, group_.size, report_);
    return Status::Ok();
  }

  Status Finish() override { return Status::Ok(); }

 private:
  const TensorSpec spec_;
  const Slice slice_;
  const size_t num_bytes_;
  Group group_;
  const std::byte* input_ = nullptr;  // of the slice; null if we have joined
  std::byte* output_ = nullptr;
  StepReport* report_ = nullptr;
};

}  // namespace

std::unique_ptr<Exchange> MakeDenseExchange(const TensorSpec& spec, Slice slice, DenseForm form,
                                            bool pack) {
  if (form == DenseForm::kDirect) return std::make_unique<DirectDenseExchange>(spec, slice);
  return std::make_unique<OwnerDenseExchange>(spec, slice, pack);
}

}  // namespace dad
