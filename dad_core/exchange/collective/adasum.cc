#include "exchange/collective/adasum.h"

#include <cstring>
#include <vector>

#include "exchange/collective/owner_pieces.h"
#include "exchange/share/shares.h"
#include "linalg/adasum_kernels.h"

namespace dad {
namespace {

class AdasumExchange final : public Exchange {
 public:
  explicit AdasumExchange(const TensorSpec& spec)
      : spec_(spec), pieces_(spec_, {0, NumElements(spec.shape)}) {}

  Status Begin(const StepInput& input, const Group& group) override {
    DAD_RETURN_IF_ERROR(pieces_.Begin(input, group));
    num_levels_ = 0;
    while ((1 << num_levels_) < group.size) ++num_levels_;
    return Status::Ok();
  }

  int num_rounds() const override { return num_levels_ == 0 ? 1 : num_levels_ + 2; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    if (round == 0) {
      pieces_.SendContribution(peer, out);
    } else if (round <= num_levels_) {
      out.Append(dots_.data(), dots_.size() * sizeof dots_[0]);
    } else {
      pieces_.SendResult(out);
    }
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    if (round == 0) return pieces_.ContributionBytes(peer);
    if (round > num_levels_) return pieces_.ResultBytes(peer);
    return NumPairs(round) * static_cast<int64_t>(sizeof(PairDots));
  }

  std::span<std::byte> Destination(int round, int peer) override {
    return round > num_levels_ ? pieces_.ResultDestination(peer) : std::span<std::byte>{};
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    if (round == 0) {
      DAD_RETURN_IF_ERROR(TakeGradients(shares));
    } else if (round <= num_levels_) {
      DAD_RETURN_IF_ERROR(SumDots(round, shares));
      CombinePairs(round);
    } else {
      return pieces_.TakeResults(shares);
    }
    if (round < num_levels_) {
      ComputeDots(round + 1);
    } else {
      WriteOwnResult();
    }
    return Status::Ok();
  }

  Status Finish() override { return Status::Ok(); }

 private:
  // Level l = 1 .. L combines gradient i, a multiple of 2^l, with gradient i + 2^(l-1) and
  // leaves the result in place i.
  int Stride(int level) const { return 1 << (level - 1); }
  int64_t NumPairs(int level) const {
    const int stride = Stride(level);
    return (pieces_.group().size + stride - 1) / (2 * stride);
  }
  double* Gradient(int rank) { return gradients_.data() + rank * pieces_.own_count(); }

  Status TakeGradients(std::span<const ByteSpan> shares) {
    const auto contributions = pieces_.TakeContributions(shares);
    if (!contributions.ok()) return contributions.status();
    const int64_t count = pieces_.own_count();
    gradients_.resize(static_cast<size_t>(count * pieces_.group().size));
    for (int r = 0; r < pieces_.group().size; ++r) {
      const void* from = contributions.value()[static_cast<size_t>(r)];
      ScaleToDouble(from, Gradient(r), count, spec_.dtype, spec_.prescale);
    }
    return Status::Ok();
  }

  void ComputeDots(int level) {
    const int stride = Stride(level);
    dots_.clear();
    for (int64_t pair = 0; pair < NumPairs(level); ++pair) {
      const int i = static_cast<int>(pair) * 2 * stride;
      dots_.push_back(Dots(Gradient(i), Gradient(i + stride), pieces_.own_count()));
    }
  }

  // Replaces the dot products of our piece by those of the whole gradients.
  Status SumDots(int round, std::span<const ByteSpan> shares) {
    const Group& group = pieces_.group();
    std::vector<PairDots> sums(dots_.size());
    for (int r = 0; r < group.size; ++r) {
      const ByteSpan share = shares[static_cast<size_t>(r)];
      if (r != group.rank) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, share, ReceiveBytes(round, r)));
      }
      for (size_t pair = 0; pair < sums.size(); ++pair) {
        PairDots part = dots_[pair];
        if (r != group.rank) {
          std::memcpy(&part, share.data() + pair * sizeof part, sizeof part);
        }
        sums[pair].ab += part.ab;
        sums[pair].aa += part.aa;
        sums[pair].bb += part.bb;
      }
    }
    dots_ = std::move(sums);
    return Status::Ok();
  }

  void CombinePairs(int level) {
    const int stride = Stride(level);
    for (size_t pair = 0; pair < dots_.size(); ++pair) {
      const int i = static_cast<int>(pair) * 2 * stride;
      CombineAdasum(Gradient(i), Gradient(i + stride), pieces_.own_count(), dots_[pair]);
    }
  }

  void WriteOwnResult() {
    const std::span<std::byte> result = pieces_.OwnResult();
    ScaleFromDouble(Gradient(0), result.data(), pieces_.own_count(), spec_.dtype, spec_.postscale);
    const std::span<std::byte> output = pieces_.OwnOutput();
    if (!output.empty()) std::memcpy(output.data(), result.data(), result.size());
  }

  const TensorSpec spec_;
  OwnerPieces pieces_;
  int num_levels_ = 0;
  std::vector<double> gradients_;  // our piece of every rank's; kept between steps
  std::vector<PairDots> dots_;
};

}  // namespace

std::unique_ptr<Exchange> MakeAdasumExchange(const TensorSpec& spec) {
  return std::make_unique<AdasumExchange>(spec);
}

}  // namespace dad
