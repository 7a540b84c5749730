#include "exchange/device/factor.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "exchange/by_method.h"
#include "exchange/device/device_exchange.h"
#include "exchange/method/factor/factor_share.h"
#include "exchange/share/share_io.h"
#include "exchange/share/shares.h"

namespace dad {
namespace {

using T = float;
using RoundKernel = cuda::ResultKernel<float, cuda::BFloat16>;

class DeviceFactorExchange final : public DeviceExchange {
 public:
  DeviceFactorExchange(const TensorSpec& spec, std::vector<LayerShape> layers, bool bf16,
                       const ExchangeEnv& env)
      : DeviceExchange(spec, env), layers_(std::move(layers)), bf16_(bf16) {}

  int num_rounds() const override { return 1; }
  Result<DeviceEvent> Ready(int) override {
    if (stage_ == Stage::kCopying) {
      stage_ = Stage::kOnHost;
      return event_;
    }
    if (stage_ == Stage::kOnHost) {
      stage_ = Stage::kShare;
      DAD_RETURN_IF_ERROR(OrRefuse(CheckIndices()));
      if (refusal_.there()) return DeviceEvent();
      WriteFactorShare<T>(layers_, on_host_, step_.mine->scale, step_.mine->replan, *share_);
    }
    return DeviceEvent();
  }

  int64_t ReceiveBytes(int, int peer) const override {
    return group_.Joined(peer) || group_.Joined(group_.rank) ? 0 : -1;
  }
  bool SendsLength(int round, int peer) const override { return ReceiveBytes(round, peer) < 0; }

 private:
  enum class Stage { kCopying, kOnHost, kShare };

  void Reset() override {
    stage_ = Stage::kCopying;
    replan_ = step_.mine != nullptr && step_.mine->replan;
    share_.emplace(env_.pack);
  }
  void Refuse(const std::string& why) override {
    refusal_.Note(group_.rank, why);
    refusal_.Write(share_->numbers());
    stage_ = Stage::kShare;
  }
  Status Compute() override {
    DAD_RETURN_IF_ERROR(CheckOneLayer());
    return CopyOut();
  }
  Status SendShare(int, int peer, GatherBuffer& out) override {
    if (step_.mine != nullptr && !group_.Joined(peer)) share_->AppendTo(out);
    return Status::Ok();
  }
  Status ReceiveShares(int round, std::span<const ByteSpan> shares) override {
    pieces_.assign(1, {});
    for (int r = 0; r < group_.size; ++r) {
      const ByteSpan share = shares[static_cast<size_t>(r)];
      if (r == group_.rank) {
        if (step_.mine != nullptr) {
          AddOwnPieces(layers_, on_host_, r, step_.mine->scale, pieces_);
        }
      } else if (ReceiveBytes(round, r) == 0) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, share, 0));
      } else {
        DAD_RETURN_IF_ERROR(ParseFactorShare(spec_, layers_, r, share, pieces_, replan_));
      }
    }
    if (step_.mine == nullptr) return Status::Ok();
    if (step_.report != nullptr) step_.report->replan = replan_;
    return Refusal::Late(spec_, group_.rank, Pool());
  }
  // The result was written when the shares came.
  Status Deliver() override { return Status::Ok(); }
  void Drop() override {
    own_.clear();
    pieces_.clear();
  }

  // ---- what we send

  // The layer as it travels goes to the host; what of it the product needs stays here.
  Status CopyOut() {
    const LayerInput& layer = step_.mine->layers[0];
    on_host_ = {layer};
    LayerInput& host = on_host_[0];
    own_.clear();
    for (size_t i = 0; i < layer.rows.size(); ++i) {
      DAD_RETURN_IF_ERROR(CopyFactor(layer.rows[i].a, host.rows[i].a));
      DAD_RETURN_IF_ERROR(CopyFactor(layer.rows[i].d, host.rows[i].d));
    }
    for (size_t i = 0; i < layer.indexed.size(); ++i) {
      DAD_RETURN_IF_ERROR(CopyView(layer.indexed[i].index, host.indexed[i].index));
      DAD_RETURN_IF_ERROR(CopyFactor(layer.indexed[i].x, host.indexed[i].x));
    }
    for (const auto& [from, to] :
         {std::pair(&layer.dense, &host.dense), std::pair(&layer.dense_bias, &host.dense_bias)}) {
      DAD_RETURN_IF_ERROR(Keep(*from, to));
      DAD_RETURN_IF_ERROR(CopyView(*from, *to));
    }
    return Record();
  }

  // Also rounded to the wire's type: all ranks multiply what was sent.
  Status CopyFactor(const TensorView& from, TensorView& to) {
    TensorView travels = from;
    if (bf16_ && from.data != nullptr && from.dtype != DType::kFloat16 &&
        from.dtype != DType::kBFloat16) {
      const auto wide = ValuesOf<T>(bench_, from, arena_);
      if (!wide.ok()) return wide.status();
      const int64_t count = from.num_elements();
      auto* rounded = arena_.Take<cuda::BFloat16>(bench_, count);
      DAD_RETURN_IF_ERROR(arena_.status());
      DAD_RETURN_IF_ERROR(bench_.Run<RoundKernel>({wide.value(), count, 1, 1, false, rounded}));
      travels.data = rounded;
      travels.dtype = DType::kBFloat16;
    }
    DAD_RETURN_IF_ERROR(Keep(travels, &to));
    return CopyView(travels, to);
  }

  // In T on the device, to be found by its view on the host.
  Status Keep(const TensorView& values, const TensorView* host) {
    const auto found = ValuesOf<T>(bench_, values, arena_);
    if (!found.ok()) return found.status();
    own_.emplace_back(host, found.value());
    return Status::Ok();
  }

  Status CopyView(const TensorView& from, TensorView& to) {
    to = from;
    to.device = DeviceType::kCpu;
    to.device_index = -1;
    to.ready_event = nullptr;
    if (from.data == nullptr) return Status::Ok();
    DAD_RETURN_IF_ERROR(bench_.WaitFor(from));
    const Result<std::byte*> pinned = sent_.Take(bench_, from.num_bytes());
    if (!pinned.ok()) return pinned.status();
    to.data = pinned.value();
    return bench_.Copy(pinned.value(), from.data, from.num_bytes());
  }

  // Could not be looked at before.
  Status CheckIndices() const {
    for (const IndexedSegment& segment : on_host_[0].indexed) {
      const std::span<const int64_t> index(static_cast<const int64_t*>(segment.index.data),
                                           static_cast<size_t>(segment.index.num_elements()));
      const std::string why = Refusal::Outside(index, layers_[0].out);
      if (!why.empty()) return Status::Unavailable(why);
    }
    return Status::Ok();
  }

  // ---- the pooled gradient

  Status Pool() {
    const LayerShape& shape = layers_[0];
    const LayerInput& mine = step_.mine->layers[0];
    std::vector<RowsBlock> blocks = BlocksOf(pieces_[0]);
    // One block that covers W writes it; otherwise parts are added up.
    const bool covers = blocks.size() == 1 && blocks[0].out_count == shape.out;
    const bool added = !pieces_[0].indexed.empty() || !pieces_[0].dense.empty();
    // The product may as well be written as in × out; what is added to it may not.
    const bool turned = mine.transposed && covers && !added;
    DeviceResult<T> result, bias_result;
    DAD_RETURN_IF_ERROR(result.Take(bench_, mine.output, arena_));
    if (shape.bias) DAD_RETURN_IF_ERROR(bias_result.Take(bench_, mine.output_bias, arena_));
    const int64_t count = shape.out * shape.in;
    T* weight = result.values();
    if (mine.transposed && !turned && count > 0) {
      weight = arena_.Take<T>(bench_, count);
      DAD_RETURN_IF_ERROR(arena_.status());
      DAD_RETURN_IF_ERROR(bench_.Clear(weight, static_cast<size_t>(count) * sizeof(T)));
    }
    const T factor = static_cast<T>(spec_.prescale * spec_.postscale /
                                    (spec_.op == ReduceOp::kAverage ? group_.size : 1));
    for (const RowsBlock& block : blocks) {
      DAD_RETURN_IF_ERROR(
          Multiply(block, turned, factor, covers ? T(0) : T(1), weight, bias_result.values()));
    }
    DAD_RETURN_IF_ERROR(AddIndexed(factor, weight));
    DAD_RETURN_IF_ERROR(AddDense(factor, weight, bias_result.values()));
    if (weight != result.values()) {
      DAD_RETURN_IF_ERROR(
          bench_.Run<cuda::TransposeKernel<T>>({weight, shape.out, shape.in, result.values()}));
    }
    DAD_RETURN_IF_ERROR(result.Deliver(bench_, 1, 1, false));
    return bias_result.Deliver(bench_, 1, 1, false);
  }

  // Stacks the rows of all ranks and multiplies.
  Status Multiply(const RowsBlock& block, bool turned, T factor, T beta, T* weight, T* bias) {
    const int64_t in = layers_[0].in;
    if (block.rows == 0) return Status::Ok();  // the result is 0 so far
    DeviceArena work;
    auto* a = work.Take<T>(bench_, block.rows * in);
    auto* d = work.Take<T>(bench_, block.rows * block.out_count);
    auto* ones = work.Take<T>(bench_, block.rows);
    DAD_RETURN_IF_ERROR(work.status());
    for (const RowsPiece* piece : block.pieces) {
      if (!piece->has_d) return Malformed(piece->rank, "no D, and none follows from above");
      DAD_RETURN_IF_ERROR(Place(piece->a, piece->rows * in, 1, a + piece->row_begin * in));
      DAD_RETURN_IF_ERROR(Place(piece->d, piece->rows * block.out_count,
                                static_cast<T>(piece->scale),
                                d + piece->row_begin * block.out_count));
    }
    const Result<DeviceProducts*> products = bench_.Products();
    if (!products.ok()) return products.status();
    const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
    const DeviceMatrix<const T> all_a{a, block.rows, in};
    const DeviceMatrix<const T> all_d{d, block.rows, block.out_count};
    const DeviceMatrix<T> to =
        turned ? DeviceMatrix<T>{weight, in, block.out_count}
               : DeviceMatrix<T>{weight + block.out_begin * in, block.out_count, in};
    DAD_RETURN_IF_ERROR(products.value()->Multiply<T>(
        turned ? all_a : all_d, true, turned ? all_d : all_a, false, to, factor, beta));
    if (bias == nullptr) return Status::Ok();
    const std::vector<T> host_ones(static_cast<size_t>(block.rows), T(1));
    DAD_RETURN_IF_ERROR(Bring(std::as_bytes(std::span(host_ones)), ones));
    return products.value()->Multiply<T>({ones, 1, block.rows}, false, all_d, false,
                                         {bias + block.out_begin, 1, block.out_count}, factor,
                                         beta);
  }

  // Values times `scale`, to the device memory `to`.
  Status Place(const FactorValues& values, int64_t count, T scale, T* to) {
    if (count == 0) return Status::Ok();
    if (values.own != nullptr) {
      if (scale == T(1)) {
        return bench_.Copy(to, OwnValues(values), static_cast<size_t>(count) * sizeof(T));
      }
      return bench_.Run<cuda::ResultKernel<T, T>>({OwnValues(values), count, 1, scale, false, to});
    }
    const Result<std::byte*> pinned = pinned_.Take(bench_, static_cast<size_t>(count) * sizeof(T));
    if (!pinned.ok()) return pinned.status();
    auto* decoded = reinterpret_cast<T*>(pinned.value());
    DAD_RETURN_IF_ERROR(DecodeBlock(values.block, count, decoded));
    if (scale != T(1)) {
      for (int64_t i = 0; i < count; ++i) decoded[i] *= scale;
    }
    return bench_.Copy(to, decoded, static_cast<size_t>(count) * sizeof(T));
  }

  const T* OwnValues(const FactorValues& values) const {
    for (const auto& [host, device] : own_) {
      if (host == values.own) return device;
    }
    return nullptr;
  }

  Status AddIndexed(T factor, T* weight) {
    const LayerShape& shape = layers_[0];
    for (const IndexedPiece& piece : pieces_[0].indexed) {
      if (piece.rows == 0) continue;
      std::vector<uint32_t> index(static_cast<size_t>(piece.rows));
      if (piece.own_index != nullptr) {
        const auto* own = static_cast<const int64_t*>(piece.own_index->data);
        std::transform(own, own + piece.rows, index.begin(),
                       [](int64_t i) { return static_cast<uint32_t>(i); });
      } else {
        std::memcpy(index.data(), piece.index.data(), index.size() * sizeof(uint32_t));
      }
      if (std::any_of(index.begin(), index.end(), [&](uint32_t i) { return i >= shape.out; })) {
        return Malformed(-1, "an index outside of the tensor");
      }
      DeviceArena work;
      auto* where = work.Take<uint32_t>(bench_, piece.rows);
      auto* x = work.Take<T>(bench_, piece.rows * shape.in);
      DAD_RETURN_IF_ERROR(work.status());
      DAD_RETURN_IF_ERROR(Bring(std::as_bytes(std::span(index)), where));
      DAD_RETURN_IF_ERROR(Place(piece.x, piece.rows * shape.in, 1, x));
      DAD_RETURN_IF_ERROR(bench_.Run<cuda::AddRowsKernel<T>>(
          {x, where, piece.rows, shape.in, factor * static_cast<T>(piece.scale), weight}));
    }
    return Status::Ok();
  }

  Status AddDense(T factor, T* weight, T* bias) {
    const LayerShape& shape = layers_[0];
    for (const DensePiece& piece : pieces_[0].dense) {
      const T scale = factor * static_cast<T>(piece.scale);
      auto add = [&](const FactorValues& values, int64_t count, T* to) -> Status {
        if (count == 0 || to == nullptr) return Status::Ok();
        DeviceArena work;
        auto* from = work.Take<T>(bench_, count);
        DAD_RETURN_IF_ERROR(work.status());
        DAD_RETURN_IF_ERROR(Place(values, count, 1, from));
        return bench_.Run<cuda::AddKeptKernel<T>>({from, count, scale, to, to, nullptr});
      };
      DAD_RETURN_IF_ERROR(add(piece.weight, shape.out * shape.in, weight));
      if (shape.bias) DAD_RETURN_IF_ERROR(add(piece.bias, shape.out, bias));
    }
    return Status::Ok();
  }

  const std::vector<LayerShape> layers_;  // one
  const bool bf16_;
  // State of the current step.
  Stage stage_ = Stage::kCopying;
  std::vector<LayerInput> on_host_;
  std::vector<std::pair<const TensorView*, const T*>> own_;
  std::optional<ShareWriter> share_;
  std::vector<LayerPieces> pieces_;
  bool replan_ = false;
};

}  // namespace

bool FactorOnDevice(const TensorSpec& spec, const ExchangeEnv& env) {
  const std::vector<LayerShape>& layers = spec.method.layers();
  return env.device_products && layers.size() == 1 && !layers[0].pass &&
         spec.dtype != DType::kFloat64;
}

Result<std::unique_ptr<Exchange>> MakeDeviceFactorExchange(const TensorSpec& spec,
                                                           const ExchangeEnv& env) {
  return std::unique_ptr<Exchange>(std::make_unique<DeviceFactorExchange>(
      spec, spec.method.layers(), spec.method.Text("wire", "fp32") == "bf16", env));
}

}  // namespace dad
