#include "exchange/collective/dense_ring.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "exchange/share/packed_piece.h"
#include "exchange/share/shares.h"
#include "linalg/reduce.h"
#include "util/aligned_buffer.h"

namespace dad {
namespace {

class DenseRingExchange final : public Exchange {
 public:
  DenseRingExchange(const TensorSpec& spec, Slice slice, bool pack)
      : spec_(spec),
        slice_(slice),
        pack_(pack),
        element_bytes_(static_cast<int64_t>(SizeOf(spec.dtype))) {}

  Status Begin(const StepInput& input, const Group& group) override {
    if (input.mine != nullptr) DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, true));
    group_ = group;
    report_ = input.report;
    const bool has_elements = input.mine != nullptr && slice_.count > 0;
    const int64_t offset = slice_.begin * element_bytes_;
    input_ = has_elements ? input.mine->input.bytes() + offset : nullptr;
    output_ = has_elements ? input.mine->output.bytes() + offset : nullptr;
    passing_.reset();
    if (input.mine == nullptr) {
      // What is passed on needs a place all the same.
      const auto num_bytes = static_cast<size_t>(slice_.count * element_bytes_);
      passing_ = std::make_shared<AlignedBuffer>(num_bytes);
      output_ = passing_->data();
    }
    return Status::Ok();
  }

  int num_rounds() const override { return group_.size == 1 ? 1 : 2 * (group_.size - 1); }

  bool Speaks(int round, int from, int to) const override {
    (void)round;
    return to == Wrap(from + 1);
  }

  Status Send(int round, int peer, GatherBuffer& out) override {
    if (peer != Next()) return Status::Ok();
    const int piece = Wrap(group_.rank - round);
    const auto num_bytes = static_cast<size_t>(SharedBytes(round, piece, group_.rank));
    if (num_bytes == 0) return Status::Ok();
    const std::byte* from = (round == 0 ? input_ : output_) + Offset(piece);
    if (Packs(piece)) {
      const bool came_finished = round > 0 && Finished(round - 1);
      (came_finished ? came_ : PackedPiece(spec_, from, Count(piece))).AppendTo(out);
      return Status::Ok();
    }
    out.Reference(from, num_bytes);
    if (passing_ != nullptr) out.Hold(passing_);
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    if (peer != Previous()) return 0;
    const int piece = Wrap(peer - round);
    const int64_t num_bytes = SharedBytes(round, piece, peer);
    return num_bytes > 0 && Packs(piece) ? -1 : num_bytes;
  }

  bool SendsLength(int round, int peer) const override {
    const int piece = Wrap(group_.rank - round);
    return peer == Next() && SharedBytes(round, piece, group_.rank) > 0 && Packs(piece);
  }

  // A finished piece comes when all have taken what we had to say about it, so it may go
  // where that came from.
  std::span<std::byte> Destination(int round, int peer) override {
    if (!Finished(round) || peer != Previous() || input_ == nullptr) return {};
    const int piece = Wrap(peer - round);
    if (Packs(piece)) return {};
    return {output_ + Offset(piece), static_cast<size_t>(Bytes(piece))};
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    if (group_.size == 1) {
      if (input_ != nullptr) Combine(round, nullptr, 0);
      return Status::Ok();
    }
    for (int r = 0; r < group_.size; ++r) {
      if (r == group_.rank) continue;
      const ByteSpan share = shares[static_cast<size_t>(r)];
      const int64_t num_bytes = ReceiveBytes(round, r);
      if (num_bytes >= 0) DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, share, num_bytes));
    }
    const ByteSpan share = shares[static_cast<size_t>(Previous())];
    const int piece = Wrap(Previous() - round);
    if (ReceiveBytes(round, Previous()) < 0) return TakePacked(round, share, piece);
    if (!Finished(round)) {
      Combine(round, share.empty() ? nullptr : share.data(), piece);
    } else if (!share.empty() && share.data() != output_ + Offset(piece)) {
      std::memcpy(output_ + Offset(piece), share.data(), share.size());
    }
    return Status::Ok();
  }

  Status Finish() override {
    Cancel();
    return Status::Ok();
  }

  void Cancel() override {
    passing_.reset();
    came_ = PackedPiece();
  }

 private:
  int Wrap(int i) const { return ((i % group_.size) + group_.size) % group_.size; }
  int Next() const { return Wrap(group_.rank + 1); }
  int Previous() const { return Wrap(group_.rank - 1); }
  bool Finished(int round) const { return round >= group_.size - 1; }

  int64_t Offset(int piece) const { return slice_.count * piece / group_.size * element_bytes_; }
  int64_t Bytes(int piece) const { return Offset(piece + 1) - Offset(piece); }
  int64_t Count(int piece) const { return Bytes(piece) / element_bytes_; }
  bool Packs(int piece) const { return pack_ && PacksPiece(spec_, Count(piece)); }

  // What `from` sends of a piece: nothing as long as all that had it have joined.
  int64_t SharedBytes(int round, int piece, int from) const {
    if (Finished(round)) return Bytes(piece);
    for (int i = 0; i <= round; ++i) {
      if (!group_.Joined(Wrap(from - i))) return Bytes(piece);
    }
    return 0;
  }

  Status TakePacked(int round, ByteSpan share, int piece) {
    if (!Finished(round)) {
      AlignedBuffer values(static_cast<size_t>(Bytes(piece)));
      DAD_RETURN_IF_ERROR(UnpackPiece(spec_, Previous(), share, Count(piece), values.data()));
      Combine(round, values.data(), piece);
      return Status::Ok();
    }
    const bool goes_on = round + 1 < num_rounds();
    if (goes_on) came_ = PackedPiece(share);
    if (passing_ != nullptr) return Status::Ok();  // nobody here looks at it
    return UnpackPiece(spec_, Previous(), share, Count(piece), output_ + Offset(piece));
  }

  // Our values to what came, which is null if nothing has: into the output, from where it goes on.
  void Combine(int round, const std::byte* came, int piece) {
    const std::byte* own = input_ == nullptr ? nullptr : input_ + Offset(piece);
    if (came == nullptr && own == nullptr) return;
    const bool last = Finished(round + 1);
    const ReduceOp op = spec_.op == ReduceOp::kAverage && !last ? ReduceOp::kSum : spec_.op;
    const double postscale = last ? spec_.postscale : 1.0;
    // In blocks, so that values that have to be scaled first stay in the cache.
    std::array<std::byte, kBlockBytes> scaled;
    std::byte* out = output_ + Offset(piece);
    for (int64_t begin = 0; begin < Bytes(piece); begin += kBlockBytes) {
      const int64_t count = std::min(kBlockBytes, Bytes(piece) - begin) / element_bytes_;
      std::array<const void*, 2> both = {came == nullptr ? nullptr : came + begin,
                                         own == nullptr ? nullptr : own + begin};
      double prescale = spec_.prescale;
      if (round > 0 && came != nullptr && prescale != 1.0) {  // what came is scaled
        if (own != nullptr) {
          ReduceInRankOrder(std::span(&both[1], 1), scaled.data(), count, spec_.dtype,
                            ReduceOp::kSum, prescale, 1.0, 1);
          both[1] = scaled.data();
        }
        prescale = 1.0;
      }
      const bool finite = ReduceInRankOrder(both, out + begin, count, spec_.dtype, op, prescale,
                                            postscale, group_.size);
      if (!finite && report_ != nullptr && report_->suspect < 0) {
        // In the first round the peer's own values came; later a rank before us has noticed.
        const int who = FirstNotFinite(both, out + begin, count, spec_.dtype);
        if (who == 1) report_->suspect = group_.rank;
        if (who == 0 && round == 0) report_->suspect = Previous();
      }
    }
  }

  static constexpr int64_t kBlockBytes = 16 << 10;

  const TensorSpec spec_;
  const Slice slice_;
  const bool pack_;
  const int64_t element_bytes_;
  Group group_;
  const std::byte* input_ = nullptr;        // of the slice; null if we have joined
  std::byte* output_ = nullptr;             // where pieces are put together and sent on from
  std::shared_ptr<AlignedBuffer> passing_;  // the output of a rank that has joined
  StepReport* report_ = nullptr;
  PackedPiece came_;  // finished, to go on in the next round
};

}  // namespace

bool CanGoRound(const TensorSpec& spec) {
  return spec.dtype == DType::kFloat32 || spec.dtype == DType::kFloat64;
}

std::unique_ptr<Exchange> MakeDenseRingExchange(const TensorSpec& spec, Slice slice, bool pack) {
  return std::make_unique<DenseRingExchange>(spec, slice, pack);
}

}  // namespace dad
