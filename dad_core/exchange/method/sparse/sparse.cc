#include "exchange/method/sparse/sparse.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <vector>

#include "codec/accumulate.h"
#include "codec/sparse_code.h"
#include "codec/strom.h"
#include "codec/topk.h"
#include "codec/vgc.h"
#include "exchange/by_method.h"
#include "exchange/feedback/state_store.h"
#include "exchange/layer/layer_result.h"
#include "exchange/method/sparse/sparse_settings.h"
#include "exchange/method/sparse/sparse_state.h"
#include "exchange/share/share_io.h"
#include "exchange/share/shares.h"
#include "linalg/moments.h"
#include "util/parallel.h"

namespace dad {
namespace {

// Tensors from here on are worth several threads, and do not stay in the caches between steps.
constexpr int64_t kLargeCount = 1 << 20;
// Elements that one task works on where they need not be formed.
constexpr int64_t kTaskCount = 1 << 16;

template <typename T>
class SparseExchange final : public Exchange {
 public:
  SparseExchange(const TensorSpec& spec, const SparseSettings& settings, const ExchangeEnv& env)
      : spec_(spec), settings_(settings), env_(env) {}

  // The share is found again by its submit_id. An error comes again, where it is heard.
  void Prepare(const StepInput& input, const Group& group) override { (void)Begin(input, group); }

  Status Begin(const StepInput& input, const Group& group) override {
    group_ = group;
    step_ = input;
    not_finite_rank_ = -1;
    any_replan_ = any_too_large_ = false;
    const std::shared_ptr<SparseState<T>> made_from = std::move(state_);
    // Asked for in every step: a checkpoint may have put another in its place.
    DAD_RETURN_IF_ERROR(FindState());
    if (input.mine != nullptr && made_for_ == input.submit_id && made_from == state_) {
      return Status::Ok();  // prepared
    }
    made_for_ = 0;
    share_.clear();
    // The step before was used; what this one makes is put there when it is over.
    state_->last_share.clear();
    if (input.mine == nullptr) return Status::Ok();
    if (input.mine->layers.size() != 1) {
      return Status::InvalidArgument("\"" + spec_.name + "\": expected one layer, got " +
                                     std::to_string(input.mine->layers.size()));
    }
    MakeShare();
    made_for_ = input.submit_id;
    return Status::Ok();
  }

  int num_rounds() const override { return 1; }

  bool SendsLength(int, int peer) const override { return Travels(group_.rank, peer); }
  int64_t ReceiveBytes(int, int peer) const override { return Travels(peer, group_.rank) ? -1 : 0; }

  Status Send(int, int peer, GatherBuffer& out) override {
    if (Travels(group_.rank, peer)) out.Reference(share_.data(), share_.size());
    return Status::Ok();
  }

  Status Receive(int, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r != group_.rank && !Travels(r, group_.rank)) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[static_cast<size_t>(r)], 0));
      }
    }
    if (step_.mine == nullptr) return Status::Ok();
    const LayerInput& layer = step_.mine->layers[0];
    T* weight = weight_.Take(layer.output, settings_.weight_count(), !layer.transposed);
    std::fill_n(weight, settings_.weight_count(), T(0));
    T* bias = nullptr;
    if (settings_.layer.bias) {
      bias = bias_.Take(layer.output_bias, settings_.layer.out);
      std::fill_n(bias, settings_.layer.out, T(0));
    }
    added_ = 0;
    for (int r = 0; r < group_.size; ++r) {
      if (group_.Joined(r)) continue;
      const ByteSpan share = r == group_.rank ? ByteSpan(share_) : shares[static_cast<size_t>(r)];
      DAD_RETURN_IF_ERROR(AddShare(r, share, weight, bias));
    }
    return Status::Ok();
  }

  Status Finish() override {
    if (step_.mine == nullptr) return Status::Ok();
    Scale(weight_.values(), settings_.weight_count());
    weight_.Deliver(settings_.layer.out, settings_.layer.in);
    if (settings_.layer.bias) {
      Scale(bias_.values(), settings_.layer.out);
      bias_.Deliver();
    }
    if (step_.report != nullptr) {
      step_.report->replan = any_replan_;
      step_.report->too_large = any_too_large_;
      step_.report->not_finite = not_finite_rank_ >= 0;
      step_.report->not_finite_rank = not_finite_rank_;
      const auto all = static_cast<double>(std::max<int64_t>(1, settings_.count() * group_.size));
      step_.report->effective = static_cast<double>(added_) / all;
    }
    if (not_finite_rank_ < 0) Commit();
    made_for_ = 0;
    next_.Release();
    weight_.Release();
    bias_.Release();
    return Status::Ok();
  }

  void Cancel() override {
    made_for_ = 0;
    next_.Release();
  }

 private:
  bool Travels(int from, int to) const {
    return from != to && !group_.Joined(from) && !group_.Joined(to);
  }

  Status FindState() {
    auto make = [&] { return std::make_shared<SparseState<T>>(settings_); };
    auto found = StateOf<SparseState<T>>(spec_, env_, make);
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    const SparseSettings& had = state_->settings();
    if (had.count() != settings_.count() || had.has_variance() != settings_.has_variance() ||
        had.keeps_residual() != settings_.keeps_residual()) {
      return Status::InvalidArgument("\"" + spec_.name + "\": its state is that of another method");
    }
    state_->MakeRoom();
    return Status::Ok();
  }

  // ---- this rank's share

  // One of the layer's two tensors.
  struct Part {
    int number;     // 0: weight, 1: bias
    int64_t begin;  // of its elements in r and v
    int64_t count;
  };

  std::vector<Part> Parts() const {
    std::vector<Part> parts = {{0, 0, settings_.weight_count()}};
    if (settings_.layer.bias) parts.push_back({1, settings_.weight_count(), settings_.layer.out});
    return parts;
  }

  void MakeShare() {
    const uint8_t replan = step_.mine->replan ? kSparseReplan : 0;
    converted_.clear();
    next_ = Accumulators<T>(settings_.count(), settings_.has_variance());
    next_rms_ = state_->mean_rms;
    const SampleMoments<T> moments = CollectMoments();
    ByteWriter out;
    out.Value(replan);
    std::vector<std::vector<Selected<T>>> unsent;
    bool finite = true;
    for (const Part& part : Parts()) {
      std::vector<Selected<T>> chunks;
      SparseScale<T> scale;
      finite = finite && Gather(moments, part, scale, chunks);
      if (!finite) break;
      unsent.push_back(Encode(part, scale, chunks, out));
    }
    plain_ = nullptr;
    if (!finite) {
      share_ = {std::byte(kSparseNotFinite | replan)};
    } else if (static_cast<int64_t>(out.bytes().size()) >
               MostSparseBytes(settings_, spec_.dtype, group_.size)) {
      // Everything waits; the next plan sends it dense.
      share_ = {std::byte(kSparseTooLarge | kSparseReplan)};
      const std::vector<Part> parts = Parts();
      for (size_t p = 0; p < parts.size(); ++p) PutBack(parts[p], unsent[p]);
    } else {
      share_ = out.bytes();
    }
  }

  MatrixView<const T> AsMatrix(const TensorView& values, int64_t rows, int64_t cols) {
    if (values.dtype == DTypeOf<T>()) return ViewOf(static_cast<const T*>(values.data), rows, cols);
    std::vector<T>& wide = converted_.emplace_back(static_cast<size_t>(rows * cols));
    ConvertTo(values, wide.data());
    return ViewOf<const T>(wide.data(), rows, cols);
  }
  const T* AsArray(const TensorView& values, int64_t count) {
    return values.data == nullptr ? nullptr : AsMatrix(values, 1, count).data;
  }

  SampleMoments<T> CollectMoments() {
    const LayerInput& layer = step_.mine->layers[0];
    const int64_t m = settings_.layer.out, n = settings_.layer.in;
    const T scale = static_cast<T>(step_.mine->scale * spec_.prescale);
    SampleMoments<T> moments(env_.cpu_level, m, n, settings_.has_variance(), settings_.by_sample);
    for (const RowsSegment& segment : layer.rows) {
      const int64_t rows = segment.a.shape[0];
      const int64_t out_count = segment.d.shape[1];
      moments.AddRows({AsMatrix(segment.d, rows, out_count), AsMatrix(segment.a, rows, n), scale,
                       out_count == m ? 0 : segment.out_begin},
                      Divides(segment.samples, rows));
    }
    for (const IndexedSegment& segment : layer.indexed) {
      const int64_t rows = segment.index.num_elements();
      moments.AddIndexed(
          {static_cast<const int64_t*>(segment.index.data), AsMatrix(segment.x, rows, n), scale},
          Divides(segment.samples, rows));
    }
    // A weight without elements has no data, and may yet have a bias.
    if (layer.dense.data != nullptr || layer.dense_bias.data != nullptr) {
      const DenseTerm<T> term = {AsMatrix(layer.dense, m, n), AsArray(layer.dense_bias, m), scale};
      const T* square = AsArray(layer.dense_square, m * n);
      const T* bias_square = AsArray(layer.dense_bias_square, m);
      moments.AddDense(term, square, bias_square);
      // The common case needs no block of its own: it is read where it lies.
      if (layer.rows.empty() && layer.indexed.empty()) plain_ = term.g.data;
      plain_square_ = square;
    }
    plain_scale_ = scale;
    moments.Prepare();
    return moments;
  }

  static int64_t Divides(int64_t samples, int64_t rows) {
    return samples > 0 && rows % samples == 0 ? samples : 0;
  }

  // Adds the gradient to r and v and finds what is worth sending. False if something is not finite.
  bool Gather(const SampleMoments<T>& moments, const Part& part, SparseScale<T>& scale,
              std::vector<Selected<T>>& chunks) {
    std::vector<T> g, s;
    const T* formed = nullptr;  // G as a whole, where it is to be had
    const T* squares = nullptr;
    T factor = 1;
    if (part.number == 1) {
      g.resize(static_cast<size_t>(part.count));
      s.resize(settings_.has_variance() ? g.size() : 0);
      moments.Bias(g.data(), s.empty() ? nullptr : s.data());
      formed = g.data();
      squares = s.empty() ? nullptr : s.data();
    } else if (plain_ != nullptr) {
      formed = plain_;
      squares = plain_square_;
      factor = plain_scale_;
    } else if (settings_.has_tau() && !settings_.absolute()) {
      // τ comes before the pass, so G is wanted twice.
      g.resize(static_cast<size_t>(part.count));
      FormGradient(moments, g.data());
      formed = g.data();
    }
    if (!FindTau(part, formed, factor, scale)) return false;
    if (part.count == 0) return true;
    SelectRule<T> rule;
    rule.alpha = settings_.alpha;
    rule.zeta = static_cast<T>(settings_.zeta);
    if (settings_.has_tau()) rule.tau = static_cast<T>(scale.tau);
    // Nothing passes: topk chooses afterwards, and without a τ there has been no gradient.
    const bool none =
        settings_.rule == SparseRule::kTopK || (settings_.has_tau() && scale.tau == 0);
    if (none) rule.tau = std::numeric_limits<T>::infinity();
    const bool by_blocks = formed == nullptr || (settings_.has_variance() && squares == nullptr &&
                                                 part.number == 0 && plain_ == nullptr);
    return by_blocks ? GatherBlocks(moments, part, rule, formed, chunks)
                     : GatherFormed(part, rule, formed, squares, factor, chunks);
  }

  void FormGradient(const SampleMoments<T>& moments, T* g) const {
    const int64_t rows = settings_.layer.out, block = moments.block_rows();
    for (int64_t begin = 0; begin < rows; begin += block) {
      moments.Block(begin, std::min(block, rows - begin), g + begin * settings_.layer.in, nullptr);
    }
  }

  // False if the gradient is not finite.
  bool FindTau(const Part& part, const T* g, T factor, SparseScale<T>& scale) {
    if (!settings_.has_tau()) return true;
    if (settings_.absolute()) {
      scale.tau = static_cast<float>(settings_.tau_absolute);
      return true;
    }
    const double rms = RootMeanSquare(g, part.count, factor);
    if (!std::isfinite(rms)) return false;
    double& mean = next_rms_[static_cast<size_t>(part.number)];
    mean = mean == 0 ? rms : 0.9 * mean + 0.1 * rms;
    const double tau = settings_.tau * mean;
    // A τ beyond the range of a float would not be one.
    scale.tau =
        static_cast<float>(std::min(tau, static_cast<double>(std::numeric_limits<float>::max())));
    return true;
  }

  AccumulateBlock<T> BlockOf(const Part& part, int64_t begin, int64_t count) {
    AccumulateBlock<T> block;
    const int64_t at = part.begin + begin;
    block.count = count;
    block.new_r = next_.r() + at;
    block.new_v = settings_.has_variance() ? next_.v() + at : nullptr;
    block.r = settings_.keeps_residual() ? state_->kept.r() + at : zeros_.data();
    block.v = settings_.has_variance() ? state_->kept.v() + at : nullptr;
    block.first = static_cast<uint32_t>(begin % MaxSparseExtent(settings_.value_bits()));
    block.stream = settings_.count() >= kLargeCount;
    return block;
  }

  // Puts what tasks have found together, chunk by chunk. A task is within one chunk.
  struct Found {
    int64_t begin = 0;
    bool finite = true;
    Selected<T> selected;
  };
  bool Collect(const Part& part, std::vector<Found>& tasks, std::vector<Selected<T>>& chunks) {
    const int64_t chunk = MaxSparseExtent(settings_.value_bits());
    chunks.resize(static_cast<size_t>((part.count + chunk - 1) / chunk));
    for (Found& task : tasks) {
      if (!task.finite) return false;
      Selected<T>& to = chunks[static_cast<size_t>(task.begin / chunk)];
      if (to.index.empty()) {
        to = std::move(task.selected);
      } else {
        to.Append(task.selected);
      }
    }
    return true;
  }

  int Threads() const { return settings_.count() >= kLargeCount ? env_.threads : 1; }

  bool GatherFormed(const Part& part, const SelectRule<T>& rule, const T* g, const T* s, T factor,
                    std::vector<Selected<T>>& chunks) {
    if (!settings_.keeps_residual()) zeros_.assign(static_cast<size_t>(kTaskCount), T(0));
    std::vector<Found> tasks(static_cast<size_t>((part.count + kTaskCount - 1) / kTaskCount));
    ParallelFor(static_cast<int64_t>(tasks.size()), Threads(), [&](int64_t t) {
      Found& task = tasks[static_cast<size_t>(t)];
      task.begin = t * kTaskCount;
      AccumulateBlock<T> block =
          BlockOf(part, task.begin, std::min(kTaskCount, part.count - task.begin));
      block.g = g + task.begin;
      block.s = s == nullptr ? nullptr : s + task.begin;
      block.scale = factor;
      task.finite = Accumulate(env_.cpu_level, rule, block, task.selected);
    });
    return Collect(part, tasks, chunks);
  }

  // Forms a block of rows of G and S in the cache, and goes on with it there.
  bool GatherBlocks(const SampleMoments<T>& moments, const Part& part, const SelectRule<T>& rule,
                    const T* formed, std::vector<Selected<T>>& chunks) {
    const int64_t m = settings_.layer.out, n = settings_.layer.in;
    const int64_t rows = moments.block_rows();
    const int64_t chunk = MaxSparseExtent(settings_.value_bits());
    if (!settings_.keeps_residual()) zeros_.assign(static_cast<size_t>(rows * n), T(0));
    std::vector<Found> tasks(static_cast<size_t>((m + rows - 1) / rows));
    ParallelFor(static_cast<int64_t>(tasks.size()), Threads(), [&](int64_t t) {
      Found& task = tasks[static_cast<size_t>(t)];
      const int64_t row = t * rows;
      const int64_t count = std::min(rows, m - row) * n;
      std::vector<T> g(formed == nullptr ? static_cast<size_t>(count) : 0);
      std::vector<T> s(settings_.has_variance() ? static_cast<size_t>(count) : 0);
      moments.Block(row, std::min(rows, m - row), g.empty() ? nullptr : g.data(),
                    s.empty() ? nullptr : s.data());
      task.begin = row * n;
      // A block that reaches into the next chunk is cut there.
      for (int64_t done = 0; done < count;) {
        const int64_t begin = row * n + done;
        const int64_t part_count = std::min(count - done, chunk - begin % chunk);
        AccumulateBlock<T> block = BlockOf(part, begin, part_count);
        block.g = formed == nullptr ? g.data() + done : formed + begin;
        block.s = s.empty() ? nullptr : s.data() + done;
        task.finite = Accumulate(env_.cpu_level, rule, block, task.selected) && task.finite;
        done += part_count;
      }
    });
    SplitAtChunks(chunk, n, rows, tasks);
    return Collect(part, tasks, chunks);
  }

  // Indices begin anew in each chunk: a task that spans two has found some of both.
  void SplitAtChunks(int64_t chunk, int64_t n, int64_t rows, std::vector<Found>& tasks) {
    for (size_t t = 0; t < tasks.size(); ++t) {
      const int64_t room = chunk - tasks[t].begin % chunk;
      if (rows * n <= room) continue;
      Found second;
      second.begin = tasks[t].begin + room;
      second.finite = tasks[t].finite;
      Selected<T>& all = tasks[t].selected;
      const auto first_index = static_cast<uint32_t>(tasks[t].begin % chunk);
      size_t cut = 0;
      while (cut < all.index.size() && all.index[cut] >= first_index) ++cut;
      const auto at = static_cast<int64_t>(cut);
      second.selected.index.assign(all.index.begin() + at, all.index.end());
      second.selected.r.assign(all.r.begin() + at, all.r.end());
      if (!all.v.empty()) second.selected.v.assign(all.v.begin() + at, all.v.end());
      all.index.resize(cut);
      all.r.resize(cut);
      if (!all.v.empty()) all.v.resize(cut);
      tasks.insert(tasks.begin() + static_cast<int64_t>(t) + 1, std::move(second));
      ++t;
    }
  }

  // Appends the part to the share, and returns what it would take to put it back.
  std::vector<Selected<T>> Encode(const Part& part, SparseScale<T>& scale,
                                  std::vector<Selected<T>>& chunks, ByteWriter& out) {
    const int64_t chunk = MaxSparseExtent(settings_.value_bits());
    if (settings_.rule == SparseRule::kTopK) return EncodeTopK(part, out);
    if (settings_.rule == SparseRule::kVgc) scale.e_max = VgcTop<T>(chunks);
    scale.Write(settings_, out);
    std::vector<std::byte> bytes;
    for (size_t c = 0; c < chunks.size(); ++c) {
      const int64_t begin = static_cast<int64_t>(c) * chunk;
      T* r = next_.r() + part.begin + begin;
      T* v = settings_.has_variance() ? next_.v() + part.begin + begin : nullptr;
      const Coded coded = settings_.rule == SparseRule::kVgc
                              ? EncodeVgc(scale.e_max, static_cast<T>(settings_.zeta),
                                          settings_.feedback, chunks[c], r, v)
                              : EncodeStrom(scale.tau, !settings_.absolute(), chunks[c], r, v);
      EncodeSparse(settings_.coding, std::min(chunk, part.count - begin), coded.index, coded.code,
                   settings_.value_bits(), bytes);
    }
    out.Bytes(bytes);
    return std::move(chunks);
  }

  std::vector<Selected<T>> EncodeTopK(const Part& part, ByteWriter& out) {
    T* r = next_.r() + part.begin;
    const auto k =
        static_cast<int64_t>(std::ceil(settings_.ratio * static_cast<double>(part.count)));
    TopKLimit limit = FindTopK(r, part.count, std::clamp<int64_t>(k, 0, part.count));
    std::vector<Selected<T>> taken;
    const int64_t chunk = MaxSparseExtent(0);
    for (int64_t begin = 0; begin < part.count; begin += chunk) {
      const int64_t count = std::min(chunk, part.count - begin);
      Selected<T>& selected = taken.emplace_back();
      TakeTopK(r + begin, count, limit, selected.index, selected.r);
      std::vector<std::byte> bytes;
      EncodeSparse(settings_.coding, count, selected.index, {}, 0, bytes);
      out.Bytes(bytes);
      out.Bytes(std::as_bytes(std::span(selected.r)));
      for (uint32_t i : selected.index) r[begin + i] = T(0);
    }
    return taken;
  }

  // As if nothing of it had been selected.
  void PutBack(const Part& part, const std::vector<Selected<T>>& chunks) {
    const int64_t chunk = MaxSparseExtent(settings_.value_bits());
    for (size_t c = 0; c < chunks.size(); ++c) {
      const int64_t begin = part.begin + static_cast<int64_t>(c) * chunk;
      for (size_t k = 0; k < chunks[c].index.size(); ++k) {
        const int64_t i = begin + chunks[c].index[k];
        next_.r()[i] = chunks[c].r[k];
        if (settings_.has_variance()) {
          next_.v()[i] = chunks[c].v[k] * static_cast<T>(settings_.zeta);
        }
      }
    }
  }

  // ---- the sum of all shares

  Status AddShare(int rank, ByteSpan share, T* weight, T* bias) {
    ByteReader in(share);
    const auto flags = in.Value<uint8_t>();
    if (!in.ok() || (flags & ~kSparseAllFlags) != 0) return Malformed(rank, "bad flags");
    any_replan_ = any_replan_ || (flags & kSparseReplan) != 0;
    any_too_large_ = any_too_large_ || (flags & kSparseTooLarge) != 0;
    if ((flags & kSparseNotFinite) != 0 && not_finite_rank_ < 0) not_finite_rank_ = rank;
    if ((flags & (kSparseNotFinite | kSparseTooLarge)) == 0) {
      Result<int64_t> added = AddTensor(settings_, settings_.weight_count(), in, weight);
      if (!added.ok()) return Malformed(rank, added.status().message());
      added_ += added.value();
      if (settings_.layer.bias) {
        added = AddTensor(settings_, settings_.layer.out, in, bias);
        if (!added.ok()) return Malformed(rank, added.status().message());
        added_ += added.value();
      }
    }
    return in.AtEnd() ? Status::Ok() : Malformed(rank, "bytes are left over");
  }

  Status Malformed(int rank, const std::string& what) const {
    return Status::InvalidArgument("\"" + spec_.name + "\": rank " + std::to_string(rank) +
                                   " sent a malformed share: " + what);
  }

  // From the sum to what is applied.
  void Scale(T* sum, int64_t count) const {
    if (not_finite_rank_ >= 0) {
      std::fill_n(sum, count, std::numeric_limits<T>::quiet_NaN());
      return;
    }
    const T divisor = spec_.op == ReduceOp::kAverage ? static_cast<T>(group_.size) : T(1);
    const T factor = static_cast<T>(spec_.postscale);
    if (divisor == T(1) && factor == T(1)) return;
    for (int64_t i = 0; i < count; ++i) sum[i] = sum[i] / divisor * factor;
  }

  // The step is over and good: what it has made takes the place of what there was.
  void Commit() {
    if (settings_.keeps_residual()) std::swap(state_->kept, next_);
    state_->mean_rms = next_rms_;
    const bool sent = (std::to_integer<uint8_t>(share_[0]) & kSparseTooLarge) == 0;
    state_->last_share = sent ? std::move(share_) : std::vector<std::byte>();
  }

  const TensorSpec spec_;
  const SparseSettings settings_;
  const ExchangeEnv env_;
  Group group_;
  StepInput step_;
  std::shared_ptr<SparseState<T>> state_;
  // State of the current step.
  uint64_t made_for_ = 0;  // whose share there is, by submit_id; 0: none
  Accumulators<T> next_;
  std::array<double, 2> next_rms_ = {};
  std::vector<std::byte> share_;
  std::deque<std::vector<T>> converted_;
  std::vector<T> zeros_;
  const T* plain_ = nullptr;  // the gradient, where it comes formed and whole
  const T* plain_square_ = nullptr;
  T plain_scale_ = 1;
  LayerResult<T> weight_;
  LayerResult<T> bias_;
  int64_t added_ = 0;
  int not_finite_rank_ = -1;
  bool any_replan_ = false;
  bool any_too_large_ = false;
};

}  // namespace

Result<std::unique_ptr<Exchange>> MakeSparseExchange(const TensorSpec& spec,
                                                     const ExchangeEnv& env) {
  DAD_RETURN_IF_ERROR(CheckSummable(spec, "sparse gradients"));
  const Result<SparseSettings> settings = ParseSparseSettings(spec.method);
  if (!settings.ok()) return WrongMethod(spec, settings.status().message());
  return MakeForType<SparseExchange>(spec, settings.value(), env);
}

Result<Squares> SparseSquares(const Method& method) {
  const Result<SparseSettings> settings = ParseSparseSettings(method);
  if (!settings.ok()) return settings.status();
  if (!settings.value().has_variance()) return Squares::kNone;
  return settings.value().by_sample ? Squares::kOfSamples : Squares::kOfRows;
}

int64_t SparseShareBytes(const TensorSpec& spec) {
  // Before anything is known: one element in 32, at a byte and a half; top-k sends values, too.
  const int64_t count = NumElements(spec.shape);
  if (spec.method.Text("rule", "vgc") != "topk") return 16 + count / 32 * 3 / 2;
  const auto ratio = spec.method.Real("ratio", 0.01);
  const double taken = ratio.ok() ? ratio.value() * static_cast<double>(count) : 0;
  return 16 + static_cast<int64_t>(taken * (1.5 + static_cast<double>(SizeOf(spec.dtype))));
}

}  // namespace dad
