#include "exchange/device/sparse.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "exchange/by_method.h"
#include "exchange/device/device_exchange.h"
#include "exchange/device/sparse_coder.h"
#include "exchange/device/sparse_moments.h"
#include "exchange/device/sparse_state.h"
#include "exchange/method/sparse/sparse.h"
#include "exchange/method/sparse/sparse_settings.h"
#include "exchange/share/shares.h"

namespace dad {
namespace {

template <typename T>
class DeviceSparseExchange final : public DeviceExchange {
 public:
  DeviceSparseExchange(const TensorSpec& spec, const SparseSettings& settings,
                       const ExchangeEnv& env, std::unique_ptr<Exchange> on_host)
      : DeviceExchange(spec, env, std::move(on_host)),
        settings_(settings),
        coder_(bench_, settings_) {}

  int num_rounds() const override { return 1; }
  // First for the heads, then for the share.
  Result<DeviceEvent> Ready(int) override {
    if (stage_ == Stage::kComputing) {
      stage_ = Stage::kHeads;
      return event_;
    }
    if (stage_ == Stage::kHeads) {
      stage_ = Stage::kShare;
      DAD_RETURN_IF_ERROR(OrRefuse(MakeShare()));
      return event_;
    }
    return DeviceEvent();
  }

  bool SendsLength(int, int peer) const override { return Travels(group_.rank, peer); }
  int64_t ReceiveBytes(int, int peer) const override { return Travels(peer, group_.rank) ? -1 : 0; }

 private:
  enum class Stage { kComputing, kHeads, kShare };

  // One of the layer's two tensors.
  struct Part {
    size_t number;  // 0: weight, 1: bias
    int64_t begin;  // of its elements in r and v
    int64_t count;
  };

  void Reset() override {
    not_finite_rank_ = -1;
    any_replan_ = any_too_large_ = false;
    added_ = 0;
    stage_ = Stage::kComputing;
  }
  void LeaveToHost() override { MoveState<DeviceSparseState<T>>(spec_, env_); }
  void Refuse(const std::string& why) override {
    refusal_.Note(group_.rank, why);
    ByteWriter out;
    refusal_.Write(out);
    refusal_share_ = out.bytes();
    share_ = refusal_share_.data();
    share_bytes_ = refusal_share_.size();
    stage_ = Stage::kShare;
  }

  Status Compute() override {
    DAD_RETURN_IF_ERROR(CheckOneLayer());
    DAD_RETURN_IF_ERROR(FindState());
    // The step before was used; what this one makes is put there when it is over.
    state_->last.clear();
    return ComputeHeads();
  }

  Status SendShare(int, int peer, GatherBuffer& out) override {
    if (Travels(group_.rank, peer)) out.Reference(share_, share_bytes_);
    return Status::Ok();
  }

  Status ReceiveShares(int, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      if (r != group_.rank && !Travels(r, group_.rank)) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, shares[static_cast<size_t>(r)], 0));
      }
    }
    if (step_.mine == nullptr) return Status::Ok();
    // Without the memory for a sum the shares are read all the same: whether the step counts is the
    // matter of all.
    Status added = TakeResult();
    for (int r = 0; r < group_.size; ++r) {
      if (group_.Joined(r)) continue;
      adds_ = added.ok();
      const Status status =
          r == group_.rank ? AddOwn() : AddShare(r, shares[static_cast<size_t>(r)]);
      if (!Refusal::Is(status)) DAD_RETURN_IF_ERROR(status);
      if (added.ok()) added = status;
    }
    return Refusal::Late(spec_, group_.rank, added);
  }

  Status Deliver() override {
    const bool nothing = not_finite_rank_ >= 0;
    const T divisor = spec_.op == ReduceOp::kAverage ? static_cast<T>(group_.size) : T(1);
    for (const Part& part : Parts()) {
      DAD_RETURN_IF_ERROR(
          result_[part.number].Deliver(bench_, divisor, static_cast<T>(spec_.postscale), nothing));
    }
    if (step_.report != nullptr) {
      step_.report->replan = any_replan_;
      step_.report->too_large = any_too_large_;
      step_.report->not_finite = nothing;
      step_.report->not_finite_rank = not_finite_rank_;
      const auto all = static_cast<double>(std::max<int64_t>(1, settings_.count() * group_.size));
      step_.report->effective = static_cast<double>(added_) / all;
    }
    if (!nothing) Commit();
    return Status::Ok();
  }

  void Drop() override {
    new_r_ = new_v_ = new_mean_ = nullptr;
    own_.clear();
    tensors_.clear();
    chunks_.clear();
  }

  bool Travels(int from, int to) const {
    return from != to && !group_.Joined(from) && !group_.Joined(to);
  }

  std::vector<Part> Parts() const {
    std::vector<Part> parts = {{0, 0, settings_.weight_count()}};
    if (settings_.layer.bias) parts.push_back({1, settings_.weight_count(), settings_.layer.out});
    return parts;
  }

  Status FindState() {
    MoveState<SparseState<T>>(spec_, env_);
    auto make = [&] { return std::make_shared<DeviceSparseState<T>>(settings_, env_.bench); };
    auto found = StateOf<DeviceSparseState<T>>(spec_, env_, make);
    if (!found.ok()) return found.status();
    state_ = std::move(found).value();
    const SparseSettings& had = state_->settings();
    if (had.count() != settings_.count() || had.has_variance() != settings_.has_variance()) {
      return Status::InvalidArgument("\"" + spec_.name + "\": its state is that of another method");
    }
    return state_->MakeRoom();
  }

  // ---- this rank's share

  // What comes to the host first: {not_finite}, a head for each part, one for each chunk.
  static constexpr size_t kHeadsBegin = 16;
  size_t HeadsBytes() const {
    size_t chunks = 0;
    for (const Part& part : Parts()) {
      chunks += static_cast<size_t>(SparseCoder<T>::NumChunks(settings_, part.count));
    }
    return kHeadsBegin + 2 * sizeof(TensorHead<T>) + chunks * sizeof(ChunkHead);
  }
  static TensorHead<T>* TensorHeads(std::byte* heads) {
    return reinterpret_cast<TensorHead<T>*>(heads + kHeadsBegin);
  }
  static ChunkHead* ChunkHeads(std::byte* heads) {
    return reinterpret_cast<ChunkHead*>(TensorHeads(heads) + 2);
  }

  // All that can be done without the host knowing anything.
  Status ComputeHeads() {
    for (auto* block : {&new_r_, &new_v_, &new_mean_}) {
      const size_t values = static_cast<size_t>(settings_.count()) * sizeof(T);
      const bool wanted = block != &new_v_ || settings_.has_variance();
      Result<DeviceBlock> taken = bench_.Take(!wanted               ? 0
                                              : block == &new_mean_ ? 2 * sizeof(double)
                                                                    : values);
      if (!taken.ok()) return taken.status();
      *block = std::move(taken).value();
    }
    DAD_RETURN_IF_ERROR(bench_.Copy(new_mean_.get(), state_->means(), 2 * sizeof(double)));
    const size_t heads_bytes = HeadsBytes();
    heads_ = arena_.Take<std::byte>(bench_, static_cast<int64_t>(heads_bytes));
    DAD_RETURN_IF_ERROR(arena_.status());
    DAD_RETURN_IF_ERROR(bench_.Clear(heads_, heads_bytes));
    ChunkHead* chunk_heads = ChunkHeads(heads_);
    tensors_.clear();
    chunks_.assign(2, {});
    for (const Part& part : Parts()) {
      Result<SparseTensor<T>> tensor = TensorOf(part);
      if (!tensor.ok()) return tensor.status();
      tensors_.push_back(tensor.value());
      DAD_RETURN_IF_ERROR(coder_.Encode(tensor.value(), TensorHeads(heads_) + part.number,
                                        chunk_heads, reinterpret_cast<int*>(heads_), arena_,
                                        chunks_[part.number]));
      chunk_heads += chunks_[part.number].size();
    }
    const Result<std::byte*> pinned = pinned_.Take(bench_, heads_bytes);
    if (!pinned.ok()) return pinned.status();
    host_heads_ = pinned.value();
    DAD_RETURN_IF_ERROR(bench_.Copy(host_heads_, heads_, heads_bytes));
    return Record();
  }

  Result<SparseTensor<T>> TensorOf(const Part& part) {
    const LayerInput& layer = step_.mine->layers[0];
    const bool weight = part.number == 0;
    SparseTensor<T> tensor;
    tensor.count = part.count;
    tensor.scale = static_cast<T>(step_.mine->scale * spec_.prescale);
    const auto g = ValuesOf<T>(bench_, weight ? layer.dense : layer.dense_bias, arena_);
    if (!g.ok()) return g.status();
    tensor.g = g.value();
    if (tensor.g == nullptr && part.count > 0) {  // no gradient
      auto* zeros = arena_.Take<T>(bench_, part.count);
      DAD_RETURN_IF_ERROR(arena_.status());
      DAD_RETURN_IF_ERROR(bench_.Clear(zeros, static_cast<size_t>(part.count) * sizeof(T)));
      tensor.g = zeros;
    }
    const auto s =
        ValuesOf<T>(bench_, weight ? layer.dense_square : layer.dense_bias_square, arena_);
    if (!s.ok()) return s.status();
    tensor.s = s.value();
    tensor.r = state_->r_values() + part.begin;
    tensor.new_r = reinterpret_cast<T*>(new_r_.get()) + part.begin;
    if (settings_.has_variance()) {
      tensor.v = state_->v_values() + part.begin;
      tensor.new_v = reinterpret_cast<T*>(new_v_.get()) + part.begin;
    }
    if (!layer.rows.empty() && part.count > 0) {
      DAD_RETURN_IF_ERROR(AddRowMoments(bench_, layer, settings_.layer, weight, tensor, arena_));
    }
    tensor.mean = state_->means() + part.number;
    tensor.new_mean = reinterpret_cast<double*>(new_mean_.get()) + part.number;
    return tensor;
  }

  // A share, piece by piece: numbers of the host, and what is still on the device.
  struct Piece {
    std::vector<std::byte> numbers;
    const void* device = nullptr;
    size_t num_bytes = 0;
  };

  Status MakeShare() {
    int not_finite = 0;
    std::memcpy(&not_finite, host_heads_, sizeof not_finite);
    const uint8_t replan = step_.mine->replan ? kSparseReplan : 0;
    own_.clear();
    if (not_finite != 0) return SendFlags(kSparseNotFinite | replan);
    std::vector<Piece> pieces = Pieces(replan);
    size_t total = 0;
    for (const Piece& piece : pieces) total += piece.numbers.size() + piece.num_bytes;
    if (static_cast<int64_t>(total) > MostSparseBytes(settings_, spec_.dtype, group_.size)) {
      // Everything waits; the next plan sends it dense.
      own_.clear();
      for (const SparseTensor<T>& tensor : tensors_) {
        DAD_RETURN_IF_ERROR(coder_.KeepAll(tensor, reinterpret_cast<int*>(heads_)));
      }
      return SendFlags(kSparseTooLarge | kSparseReplan);
    }
    DAD_RETURN_IF_ERROR(KeepOwnWords());
    std::byte* to = nullptr;
    DAD_RETURN_IF_ERROR(TakeShare(total, to));
    for (const Piece& piece : pieces) {
      if (!piece.numbers.empty()) std::memcpy(to, piece.numbers.data(), piece.numbers.size());
      to += piece.numbers.size();
      DAD_RETURN_IF_ERROR(bench_.Copy(to, piece.device, piece.num_bytes));
      to += piece.num_bytes;
    }
    return Record();
  }

  Status SendFlags(int flags) {
    std::byte* to = nullptr;
    DAD_RETURN_IF_ERROR(TakeShare(1, to));
    *to = static_cast<std::byte>(flags);
    return Record();
  }

  Status TakeShare(size_t num_bytes, std::byte*& share) {
    const Result<std::byte*> pinned = sent_.Take(bench_, num_bytes);
    if (!pinned.ok()) return pinned.status();
    share_ = share = pinned.value();
    share_bytes_ = num_bytes;
    return Status::Ok();
  }

  // As exchange/sparse.h and codec/sparse_code.h have it; and what of it is our own to add.
  std::vector<Piece> Pieces(uint8_t flags) {
    std::vector<Piece> pieces;
    ByteWriter numbers;
    numbers.Value(flags);
    const ChunkHead* head = ChunkHeads(host_heads_);
    for (const Part& part : Parts()) {
      const TensorHead<T>& of_tensor = TensorHeads(host_heads_)[part.number];
      SparseScale<T> scale;
      scale.e_max = cuda::TopExponent<T>(of_tensor.top);
      scale.tau = of_tensor.threshold.tau;
      scale.Write(settings_, numbers);
      for (const CodedChunk& chunk : chunks_[part.number]) {
        const auto count = static_cast<size_t>(head->count);
        DeviceWords<T>& own = own_.emplace_back();
        own.begin = part.begin + chunk.begin;
        own.count = head->count;
        scale.Values(settings_, own.values);
        numbers.Varint(count);
        const auto put = [&](const void* device, size_t num_bytes) {
          pieces.push_back({numbers.bytes(), device, num_bytes});
          numbers = {};
        };
        if (settings_.coding == Coding::kWord) {
          put(chunk.words, count * sizeof(uint32_t));
        } else if (count > 0) {
          numbers.Value(static_cast<uint8_t>(head->k));
          put(chunk.codes, (count * static_cast<size_t>(settings_.value_bits()) + 7) / 8);
          put(chunk.gaps, (static_cast<size_t>(head->bits) + 7) / 8);
        }
        ++head;
      }
    }
    pieces.push_back({numbers.bytes(), nullptr, 0});
    return pieces;
  }

  // To memory of their size: they stay until the next step, for ReturnLast.
  Status KeepOwnWords() {
    size_t at = 0;
    for (const Part& part : Parts()) {
      for (const CodedChunk& chunk : chunks_[part.number]) {
        DeviceWords<T>& own = own_[at++];
        const size_t num_bytes = static_cast<size_t>(own.count) * sizeof(uint32_t);
        Result<DeviceBlock> block = bench_.Take(num_bytes);
        if (!block.ok()) return block.status();
        own.words = std::move(block).value();
        DAD_RETURN_IF_ERROR(bench_.Copy(own.words.get(), chunk.words, num_bytes));
      }
    }
    return Status::Ok();
  }

  // ---- the sum of all shares

  Status TakeResult() {
    const LayerInput& layer = step_.mine->layers[0];
    result_[0] = result_[1] = {};
    DAD_RETURN_IF_ERROR(result_[0].Take(bench_, layer.output, arena_));
    return settings_.layer.bias ? result_[1].Take(bench_, layer.output_bias, arena_) : Status::Ok();
  }

  // Where an element of r is summed up.
  T* SumAt(int64_t begin) const {
    const int64_t weight = settings_.weight_count();
    return begin < weight || !settings_.layer.bias ? result_[0].values() + begin
                                                   : result_[1].values() + (begin - weight);
  }

  void Note(int rank, int flags) {
    any_replan_ = any_replan_ || (flags & kSparseReplan) != 0;
    any_too_large_ = any_too_large_ || (flags & kSparseTooLarge) != 0;
    if ((flags & kSparseNotFinite) != 0 && not_finite_rank_ < 0) not_finite_rank_ = rank;
  }

  Status AddOwn() {
    Note(group_.rank, std::to_integer<int>(share_[0]));
    for (const DeviceWords<T>& own : own_) {
      added_ += own.count;
      if (!adds_) continue;
      DAD_RETURN_IF_ERROR(AddWords(bench_, settings_,
                                   reinterpret_cast<const uint32_t*>(own.words.get()), own.count,
                                   own.values, SumAt(own.begin)));
    }
    return Status::Ok();
  }

  Status AddShare(int rank, ByteSpan share) {
    ByteReader in(share);
    const auto flags = in.Value<uint8_t>();
    if (!in.ok() || (flags & ~kSparseAllFlags) != 0)
      return Malformed(rank, "a malformed share: bad flags");
    Note(rank, flags);
    if ((flags & (kSparseNotFinite | kSparseTooLarge)) == 0) {
      for (const Part& part : Parts()) {
        const Result<std::vector<SparseWords<T>>> chunks = ReadTensor<T>(settings_, part.count, in);
        if (!chunks.ok()) return Malformed(rank, "a malformed share: " + chunks.status().message());
        for (const SparseWords<T>& chunk : chunks.value()) {
          DAD_RETURN_IF_ERROR(AddChunk(chunk, part.begin));
        }
      }
    }
    return in.AtEnd() ? Status::Ok() : Malformed(rank, "a malformed share: bytes are left over");
  }

  Status AddChunk(const SparseWords<T>& chunk, int64_t part_begin) {
    const auto count = static_cast<int64_t>(chunk.words.size());
    added_ += count;
    if (count == 0 || !adds_) return Status::Ok();
    DeviceArena work;
    auto* words = work.Take<uint32_t>(bench_, count);
    DAD_RETURN_IF_ERROR(work.status());
    DAD_RETURN_IF_ERROR(Bring(std::as_bytes(std::span(chunk.words)), words));
    return AddWords(bench_, settings_, words, count, chunk.values, SumAt(part_begin + chunk.begin));
  }

  // The step is over and good: what it has made takes the place of what there was.
  void Commit() {
    state_->r = std::move(new_r_);
    state_->v = std::move(new_v_);
    state_->mean_rms = std::move(new_mean_);
    state_->last = std::move(own_);
  }

  const SparseSettings settings_;
  SparseCoder<T> coder_;
  std::shared_ptr<DeviceSparseState<T>> state_;
  // State of the current step.
  Stage stage_ = Stage::kComputing;
  DeviceBlock new_r_, new_v_, new_mean_;
  std::byte* heads_ = nullptr;  // on the device
  std::byte* host_heads_ = nullptr;
  std::vector<SparseTensor<T>> tensors_;
  std::vector<std::vector<CodedChunk>> chunks_;  // by part
  std::vector<DeviceWords<T>> own_;
  const std::byte* share_ = nullptr;
  size_t share_bytes_ = 0;
  std::vector<std::byte> refusal_share_;
  DeviceResult<T> result_[2];
  bool adds_ = true;  // there is memory to add shares in
  int64_t added_ = 0;
  int not_finite_rank_ = -1;
  bool any_replan_ = false;
  bool any_too_large_ = false;
};

// Whether products of rows give all that the method wants of them.
bool RowsMultiply(const LayerInput& layer, const Method& method) {
  const bool by_sample =
      method.Text("variance", "row") == "sample" && method.Text("rule", "vgc") != "strom";
  for (const RowsSegment& segment : layer.rows) {
    const int64_t rows = segment.a.shape[0];
    if (by_sample && segment.samples > 0 && segment.samples < rows) return false;
    if (segment.d.data == nullptr && rows > 0) return false;
  }
  return true;
}

template <typename T>
bool Near(const LayerInput& layer) {
  for (const RowsSegment& segment : layer.rows) {
    if (!IsNear<T>(segment.a) || !IsNear<T>(segment.d)) return false;
  }
  for (const TensorView* view : {&layer.dense, &layer.dense_bias, &layer.dense_square,
                                 &layer.dense_bias_square, &layer.output, &layer.output_bias}) {
    if (!IsNear<T>(*view)) return false;
  }
  return true;
}

}  // namespace

bool SparseOnDevice(const TensorSpec& spec, const ExchangeEnv&) {
  return spec.method.Text("rule", "vgc") != "topk";
}

bool SparseTakesFromDevice(const TensorSpec& spec, const Contribution& mine,
                           const ExchangeEnv& env) {
  if (mine.layers.size() != 1) return false;
  const LayerInput& layer = mine.layers[0];
  if (!layer.indexed.empty() || layer.transposed) return false;
  const bool multiplies = env.bench->has_products() && RowsMultiply(layer, spec.method);
  if (!layer.rows.empty() && !multiplies) return false;
  return spec.dtype == DType::kFloat64 ? Near<double>(layer) : Near<float>(layer);
}

Result<std::unique_ptr<Exchange>> MakeDeviceSparseExchange(const TensorSpec& spec,
                                                           const ExchangeEnv& env) {
  const Result<SparseSettings> settings = ParseSparseSettings(spec.method);
  Result<std::unique_ptr<Exchange>> on_host = MakeSparseExchange(spec, env);
  if (!settings.ok() || !on_host.ok()) return on_host.status();
  return MakeForType<DeviceSparseExchange>(spec, settings.value(), env, std::move(on_host).value());
}

}  // namespace dad
