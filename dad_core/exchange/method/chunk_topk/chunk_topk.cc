#include "exchange/method/chunk_topk/chunk_topk.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "codec/chunk_topk.h"
#include "exchange/by_method.h"
#include "exchange/layer/layer_result.h"
#include "exchange/method/chunk_topk/chunk_topk_gradient.h"
#include "exchange/method/chunk_topk/chunk_topk_state.h"
#include "exchange/method/chunk_topk/chunk_topk_work.h"
#include "exchange/share/share_io.h"
#include "exchange/share/shares.h"
#include "util/parallel.h"

namespace dad {
namespace {

// Tensors from here on are worth several threads.
constexpr int64_t kLargeCount = 1 << 20;
template <typename T>
class ChunkTopKExchange final : public Exchange {
 public:
  ChunkTopKExchange(const TensorSpec& spec, const ChunkTopKSettings& settings,
                    const ExchangeEnv& env)
      : spec_(spec),
        settings_(settings),
        code_(settings.code),
        count_(NumElements(spec.shape)),
        env_(env) {}

  // The shares are found again by their submit_id. An error comes again, where it is heard.
  void Prepare(const StepInput& input, const Group& group) override { (void)Begin(input, group); }

  Status Begin(const StepInput& input, const Group& group) override {
    if (input.mine != nullptr) DAD_RETURN_IF_ERROR(Check(*input.mine));
    group_ = group;
    step_ = input;
    by_owner_ = settings_.by_owner && group.size > 1;
    pieces_ = {count_, code_.chunk, group.size, settings_.first};
    not_finite_ = false;
    not_finite_rank_ = -1;
    applied_ = 0;
    const std::shared_ptr<ChunkTopKState<T>> made_from = std::move(state_);
    // Asked for in every step: a checkpoint may have put another in its place.
    DAD_RETURN_IF_ERROR(FindState());
    if (input.mine != nullptr && made_for_ == input.submit_id && made_from == state_) {
      return Status::Ok();  // prepared
    }
    made_for_ = 0;
    shares_.clear();
    state_->last.clear();
    if (input.mine == nullptr) return Status::Ok();
    MakeShares();
    made_for_ = input.submit_id;
    return Status::Ok();
  }

  int num_rounds() const override { return by_owner_ ? 2 : 1; }

  bool SendsLength(int round, int peer) const override { return Sends(round, group_.rank, peer); }
  int64_t ReceiveBytes(int round, int peer) const override {
    return Sends(round, peer, group_.rank) ? -1 : 0;
  }
  bool Speaks(int round, int from, int to) const override { return Sends(round, from, to); }

  Status Send(int round, int peer, GatherBuffer& out) override {
    if (!Sends(round, group_.rank, peer)) return Status::Ok();
    const std::vector<std::byte>& share =
        round == 1 ? result_ : shares_[by_owner_ ? static_cast<size_t>(peer) : 0];
    out.Reference(share.data(), share.size());
    return Status::Ok();
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r != group_.rank && !Sends(round, r, group_.rank)) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[static_cast<size_t>(r)], 0));
      }
    }
    if (!by_owner_) return AddAll(shares);
    return round == 0 ? Reduce(shares) : TakeResults(shares);
  }

  Status Finish() override {
    if (!not_finite_) CommitOwner();
    sum_.Release();
    if (step_.mine == nullptr) return Status::Ok();
    Deliver();
    if (step_.report != nullptr) {
      step_.report->not_finite = not_finite_;
      step_.report->not_finite_rank = not_finite_rank_;
      const int64_t all = std::max<int64_t>(1, count_ * (by_owner_ ? 1 : group_.size));
      step_.report->effective = static_cast<double>(applied_) / static_cast<double>(all);
    }
    if (!not_finite_) {
      CommitRank();
      KeepLast();
    }
    made_for_ = 0;
    next_.Release();
    output_.Release();
    return Status::Ok();
  }

  void Cancel() override {
    made_for_ = 0;
    next_.Release();
    sum_.Release();
  }

 private:
  Status Check(const Contribution& mine) const {
    if (!settings_.by_layer) return CheckContribution(spec_, mine, true);
    if (mine.layers.size() == 1) return Status::Ok();
    return Status::InvalidArgument("\"" + spec_.name + "\": expected one layer, got " +
                                   std::to_string(mine.layers.size()));
  }

  // Whether `from` sends `to` anything, the same answer on both.
  bool Sends(int round, int from, int to) const {
    if (from == to) return false;
    if (!by_owner_) return !group_.Joined(from) && !group_.Joined(to);
    return round == 0 ? !group_.Joined(from) && pieces_.Size(to) > 0
                      : !group_.Joined(to) && pieces_.Size(from) > 0;
  }

  Status FindState() {
    auto make = [&] { return std::make_shared<ChunkTopKState<T>>(code_); };
    auto found = StateOf<ChunkTopKState<T>>(spec_, env_, make);
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    const Status fits = state_->Fit(count_, by_owner_ ? pieces_.Begin(group_.rank) : 0,
                                    by_owner_ ? pieces_.Size(group_.rank) : 0);
    if (fits.ok()) return fits;
    return Status::InvalidArgument("\"" + spec_.name + "\": " + fits.message());
  }

  int Threads() const { return count_ >= kLargeCount ? env_.threads : 1; }

  // ---- this rank's shares

  static std::vector<std::byte> NotFiniteShare() { return {std::byte{1}}; }

  void MakeShares() {
    GradientValues<T> gradient = TakeGradient();
    places_ = std::move(gradient.places);
    next_ = Accumulators<T>(places_.size(), false);
    T* const next = next_.r();
    // Of rows what waits is brought together; of the whole tensor it is read where it is.
    const T* e = state_->rank.r();
    if (places_.by_rows()) {
      CopyRows(places_, e, next);
      e = next;
    }
    const T scale = static_cast<T>(step_.mine->scale * spec_.prescale);
    const T decay = static_cast<T>(settings_.decay);

    const int num_shares = by_owner_ ? group_.size : 1;
    ChunkWork<T> work(code_, places_);
    for (int s = 0; s < num_shares; ++s) {
      const int64_t begin = by_owner_ ? pieces_.Begin(s) : 0;
      work.AddShare(begin, by_owner_ ? begin + pieces_.Size(s) : count_);
    }
    const T* const g = gradient.values;
    finite_ =
        work.PickAll(Threads(), env_.cpu_level,
                     [&](ChunkPicker<T>& picker, const ChunkPart& part, uint32_t first,
                         std::vector<uint32_t>& picked) {
                       const int64_t at = part.begin;
                       return picker.Pick({g + at, scale, e + at, decay, next + at, part.count},
                                          part.k, first, picked);
                     });
    shares_.assign(static_cast<size_t>(num_shares), finite_ ? NewShare() : NotFiniteShare());
    if (!finite_) return;
    ParallelFor(num_shares, Threads(), [&](int64_t s) {
      const auto number = static_cast<size_t>(s);
      work.Encode(number, next, shares_[number]);
    });
  }

  static std::vector<std::byte> NewShare() { return {std::byte{0}}; }

  GradientValues<T> TakeGradient() const {
    const Contribution& mine = *step_.mine;
    return settings_.by_layer ? LayerGradient<T>(spec_.method.layers()[0], mine.layers[0])
                              : TensorGradient<T>(mine.input);
  }

  // ---- what came

  // Adds a share of `count` elements. One that is flagged adds nothing.
  Status AddShare(int rank, ByteSpan share, int64_t count, T* sum, std::vector<uint32_t>* most) {
    ByteReader in(share);
    const auto flag = in.Value<uint8_t>();
    if (!in.ok() || flag > 1) return Malformed(rank, "unknown flags");
    if (flag == 1) {
      not_finite_ = true;
      if (not_finite_rank_ < 0) not_finite_rank_ = rank;
    } else {
      const Result<int64_t> added = AddChunks(code_, count, in, sum, most);
      if (!added.ok()) return Malformed(rank, added.status().message());
      applied_ += added.value();
    }
    return in.AtEnd() ? Status::Ok() : Malformed(rank, "bytes are left over");
  }

  Status Malformed(int rank, const std::string& what) const {
    return Status::InvalidArgument("\"" + spec_.name + "\": rank " + std::to_string(rank) +
                                   " sent a malformed share: " + what);
  }

  T* TakeOutput() {
    T* const values = settings_.by_layer ? output_.Take(step_.mine->layers[0].output, count_,
                                                        !step_.mine->layers[0].transposed)
                                         : output_.Take(step_.mine->output, count_);
    std::fill_n(values, count_, T(0));
    return values;
  }

  Status AddAll(std::span<const ByteSpan> shares) {
    if (step_.mine == nullptr) return Status::Ok();
    T* const sum = TakeOutput();
    for (int r = 0; r < group_.size; ++r) {
      if (group_.Joined(r)) continue;
      const ByteSpan share =
          r == group_.rank ? ByteSpan(shares_[0]) : shares[static_cast<size_t>(r)];
      DAD_RETURN_IF_ERROR(AddShare(r, share, count_, sum, nullptr));
    }
    return Status::Ok();
  }

  // As an owner: S in sum_, and M encoded.
  Status Reduce(std::span<const ByteSpan> shares) {
    const int64_t count = pieces_.Size(group_.rank);
    quota_.assign(static_cast<size_t>(code_.num_chunks(count)), 0);
    result_.clear();
    // A rank that owns nothing hears nothing from others; the owners tell it.
    if (step_.mine != nullptr && !finite_) {
      not_finite_ = true;
      not_finite_rank_ = group_.rank;
    }
    if (count == 0) return Status::Ok();
    sum_ = Accumulators<T>(count, false);
    sum_.Clear();
    for (int r = 0; r < group_.size; ++r) {
      if (group_.Joined(r)) continue;
      const auto i = static_cast<size_t>(r);
      const ByteSpan share = r == group_.rank ? ByteSpan(shares_[i]) : shares[i];
      DAD_RETURN_IF_ERROR(AddShare(r, share, count, sum_.r(), &quota_));
    }
    applied_ = 0;  // that is what the owners send
    if (!not_finite_) result_ = EncodeSum(count);
    if (not_finite_) result_ = NotFiniteShare();
    return Status::Ok();
  }

  std::vector<std::byte> EncodeSum(int64_t count) {
    const T weight = spec_.op == ReduceOp::kAverage ? T(1) / static_cast<T>(group_.size) : T(1);
    const T decay = static_cast<T>(settings_.decay);
    const T* const e = state_->owner.r();
    T* const sum = sum_.r();
    const Places all(count);
    ChunkWork<T> work(code_, all, &quota_);
    work.AddShare(0, count);
    const auto pick = [&](ChunkPicker<T>& picker, const ChunkPart& part, uint32_t first,
                          std::vector<uint32_t>& picked) {
      const int64_t at = part.begin;
      return part.k == 0 || picker.Pick({sum + at, weight, e + at, decay, sum + at, part.count},
                                        part.k, first, picked);
    };
    not_finite_ = !work.PickAll(Threads(), env_.cpu_level, pick);
    std::vector<std::byte> share = NewShare();
    if (!not_finite_) work.Encode(0, sum, share);
    return share;
  }

  Status TakeResults(std::span<const ByteSpan> shares) {
    if (step_.mine == nullptr) return Status::Ok();
    T* const output = TakeOutput();
    for (int r = 0; r < group_.size; ++r) {
      const int64_t count = pieces_.Size(r);
      if (count == 0) continue;
      const ByteSpan share = r == group_.rank ? ByteSpan(result_) : shares[static_cast<size_t>(r)];
      const int culprit = not_finite_rank_;
      DAD_RETURN_IF_ERROR(AddShare(r, share, count, output + pieces_.Begin(r), nullptr));
      not_finite_rank_ = culprit;  // it is not the owner
    }
    return Status::Ok();
  }

  // ---- the end of a step

  void Deliver() {
    T* const values = output_.values();
    if (not_finite_) {
      std::fill_n(values, count_, std::numeric_limits<T>::quiet_NaN());
    } else {
      const bool divides = !by_owner_ && spec_.op == ReduceOp::kAverage;
      const T divisor = divides ? static_cast<T>(group_.size) : T(1);
      const T factor = static_cast<T>(spec_.postscale);
      if (divisor != T(1) || factor != T(1)) {
        for (int64_t i = 0; i < count_; ++i) values[i] = values[i] / divisor * factor;
      }
    }
    if (settings_.by_layer) {
      const LayerShape& layer = spec_.method.layers()[0];
      output_.Deliver(layer.out, layer.in);
    } else {
      output_.Deliver();
    }
  }

  // E_w. Rows that were not there wait as they are.
  void CommitRank() {
    if (places_.by_rows()) {
      PutRows(places_, next_.r(), state_->rank.r());
    } else {
      std::swap(state_->rank, next_);
    }
  }

  // E_o of the chunks of which something came; the others wait as they are.
  void CommitOwner() {
    if (!by_owner_ || pieces_.Size(group_.rank) == 0) return;
    const int64_t count = pieces_.Size(group_.rank);
    for (size_t c = 0; c < quota_.size(); ++c) {
      if (quota_[c] == 0) continue;
      const int64_t at = static_cast<int64_t>(c) * code_.chunk;
      std::copy_n(sum_.r() + at, std::min(code_.chunk, count - at), state_->owner.r() + at);
    }
    if (step_.mine == nullptr) KeepLast();
  }

  void KeepLast() {
    std::vector<std::byte>& from = by_owner_ ? result_ : shares_[0];
    state_->last_is_of_owner = by_owner_;
    if (from.empty()) return;
    state_->last.assign(from.begin() + 1, from.end());  // without the flag
  }

  const TensorSpec spec_;
  const ChunkTopKSettings settings_;
  const ChunkCode code_;
  const int64_t count_;
  const ExchangeEnv env_;
  Group group_;
  StepInput step_;
  ChunkPieces pieces_;
  bool by_owner_ = false;
  std::shared_ptr<ChunkTopKState<T>> state_;
  // State of the current step.
  uint64_t made_for_ = 0;                       // whose shares there are, by submit_id; 0: none
  bool finite_ = true;                          // this rank's contribution
  Places places_{0};                            // of the values of E_w that change
  Accumulators<T> next_;                        // these, after the step
  std::vector<std::vector<std::byte>> shares_;  // one, or one for each owner
  Accumulators<T> sum_;                         // S, then E_o after the step
  std::vector<uint32_t> quota_;    // how many M has of each chunk of the piece, at most
  std::vector<std::byte> result_;  // M
  LayerResult<T> output_;
  int64_t applied_ = 0;
  bool not_finite_ = false;
  int not_finite_rank_ = -1;
};

}  // namespace

Result<std::unique_ptr<Exchange>> MakeChunkTopKExchange(const TensorSpec& spec,
                                                        const ExchangeEnv& env) {
  DAD_RETURN_IF_ERROR(CheckSummable(spec, "chunked top-k"));
  Result<ChunkTopKSettings> settings = ParseChunkTopK(spec.method);
  if (!settings.ok()) return WrongMethod(spec, settings.status().message());
  return MakeForType<ChunkTopKExchange>(spec, settings.value(), env);
}

int64_t ChunkTopKShareBytes(const TensorSpec& spec) {
  const Result<ChunkTopKSettings> settings = ParseChunkTopK(spec.method);
  const int64_t count = NumElements(spec.shape);
  if (!settings.ok() || count == 0) return 1;
  return 1 + settings.value().code.ExpectedBytes(count);
}

}  // namespace dad
