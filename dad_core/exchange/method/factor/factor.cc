#include "exchange/method/factor/factor.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "exchange/by_method.h"
#include "exchange/layer/activation.h"
#include "exchange/layer/layer_result.h"
#include "exchange/method/factor/factor_share.h"
#include "exchange/share/share_io.h"
#include "exchange/share/shares.h"
#include "linalg/finite.h"
#include "linalg/products.h"
#include "util/aligned_buffer.h"
#include "util/half.h"

namespace dad {
namespace {

template <typename T>
class Scratch {
 public:
  // Memory for so many values; what was in it is lost.
  T* Take(int64_t count) {
    const size_t num_bytes = static_cast<size_t>(count) * sizeof(T);
    if (buffer_.size() < num_bytes) buffer_ = AlignedBuffer(num_bytes);
    return reinterpret_cast<T*>(buffer_.data());
  }

 private:
  AlignedBuffer buffer_;
};

TensorView RoundedToBFloat16(const TensorView& values, std::vector<uint16_t>& store) {
  const int64_t count = values.num_elements();
  store.resize(static_cast<size_t>(count));
  std::vector<float> wide(static_cast<size_t>(count));
  ConvertTo(values, wide.data());
  std::transform(wide.begin(), wide.end(), store.begin(), FloatToBFloat16);
  TensorView rounded = values;
  rounded.dtype = DType::kBFloat16;
  rounded.data = store.data();
  return rounded;
}

template <typename T>
class FactorExchange final : public Exchange {
 public:
  FactorExchange(const TensorSpec& spec, std::vector<LayerShape> layers, bool bf16,
                 const ExchangeEnv& env)
      : spec_(spec),
        layers_(std::move(layers)),
        bf16_(bf16),
        level_(env.cpu_level),
        pack_(env.pack),
        a_(layers_.size()),
        d_(layers_.size()) {}

  Status Begin(const StepInput& input, const Group& group) override {
    group_ = group;
    step_ = input;
    share_ = std::make_shared<ShareWriter>(pack_);
    rounded_.clear();
    pieces_.assign(layers_.size(), {});
    replan_ = false;
    if (input.mine == nullptr) return Status::Ok();
    const Contribution& mine = *input.mine;
    if (mine.layers.size() != layers_.size()) {
      return Status::InvalidArgument("\"" + spec_.name +
                                     "\": " + std::to_string(mine.layers.size()) +
                                     " layers, expected " + std::to_string(layers_.size()));
    }
    if (bf16_) {
      rounded_input_ = mine.layers;
      for (LayerInput& layer : rounded_input_) Round(layer);
    }
    own_ = bf16_ ? &rounded_input_ : &mine.layers;
    replan_ = mine.replan;
    WriteFactorShare<T>(layers_, *own_, mine.scale, mine.replan, *share_);
    return Status::Ok();
  }

  int num_rounds() const override { return 1; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    (void)round;
    if (step_.mine != nullptr && !group_.Joined(peer)) {
      share_->AppendTo(out);
      out.Hold(share_);
    }
    return Status::Ok();
  }

  int64_t ReceiveBytes(int round, int peer) const override {
    (void)round;
    return group_.Joined(peer) || group_.Joined(group_.rank) ? 0 : -1;
  }

  bool SendsLength(int round, int peer) const override { return ReceiveBytes(round, peer) < 0; }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    for (int r = 0; r < group_.size; ++r) {
      const ByteSpan share = shares[static_cast<size_t>(r)];
      if (r == group_.rank) {
        if (step_.mine != nullptr) {
          AddOwnPieces(layers_, *own_, r, step_.mine->scale, pieces_);
        }
      } else if (ReceiveBytes(round, r) == 0) {
        DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, share, 0));
      } else {
        DAD_RETURN_IF_ERROR(ParseFactorShare(spec_, layers_, r, share, pieces_, replan_));
      }
    }
    if (step_.mine == nullptr) return Status::Ok();
    if (step_.report != nullptr) step_.report->replan = replan_;
    for (size_t l = layers_.size(); l-- > 0;) DAD_RETURN_IF_ERROR(Pool(l));
    return Status::Ok();
  }

  Status Finish() override {
    share_.reset();
    return Status::Ok();
  }

  void Cancel() override { share_.reset(); }

 private:
  void Round(LayerInput& layer) {
    auto round = [&](TensorView& values) {
      if (values.data == nullptr || values.dtype == DType::kFloat16) return;
      values = RoundedToBFloat16(values, rounded_.emplace_back());
    };
    for (RowsSegment& segment : layer.rows) {
      round(segment.a);
      round(segment.d);
    }
    for (IndexedSegment& segment : layer.indexed) round(segment.x);
  }

  // ---- what came

  Status Malformed(int rank, const char* what) const {
    return Status::InvalidArgument("\"" + spec_.name + "\": rank " + std::to_string(rank) +
                                   " sent " + what);
  }

  static Status Decode(const FactorValues& values, int64_t count, T* out) {
    if (values.own == nullptr) return DecodeBlock(values.block, count, out);
    ConvertTo(*values.own, out);
    return Status::Ok();
  }

  // ---- the pooled gradient of a layer; from the top down

  Status Pool(size_t l) {
    std::vector<RowsBlock> blocks = BlocksOf(pieces_[l]);
    // D of the layer below follows from all of a layer, for all of its rows.
    const bool in_parts =
        blocks.size() > 1 || (blocks.size() == 1 && blocks[0].out_count != layers_[l].out);
    if (in_parts && layers_.size() > 1) {
      return Malformed(group_.rank, "or got parts of a layer of a chain");
    }
    const bool own_gradient = !layers_[l].pass;
    const int64_t out = layers_[l].out;
    const int64_t in = layers_[l].in;
    const LayerInput& mine = step_.mine->layers[l];
    // One block that covers W writes it; otherwise parts are added up.
    const bool covers = blocks.size() == 1 && blocks[0].out_count == out;
    // The product may as well be written as in × out; what is added to it may not.
    const bool turned =
        mine.transposed && covers && pieces_[l].indexed.empty() && pieces_[l].dense.empty();
    T* weight = nullptr;
    T* bias = nullptr;
    if (own_gradient) {
      weight = result_.Take(mine.output, out * in, turned == mine.transposed);
      if (layers_[l].bias) bias = bias_result_.Take(mine.output_bias, out);
    }
    const T factor = static_cast<T>(spec_.prescale * spec_.postscale /
                                    (spec_.op == ReduceOp::kAverage ? group_.size : 1));
    const MatrixView<T> gradient = ViewOf(weight, out, in);
    if (own_gradient && !covers) {
      std::fill_n(weight, out * in, T(0));
      if (bias != nullptr) std::fill_n(bias, out, T(0));
    }
    for (RowsBlock& block : blocks) {
      Result<std::pair<MatrixView<T>, MatrixView<T>>> stacked = Stack(l, block);
      if (!stacked.ok()) return stacked.status();
      const auto [a, d] = stacked.value();
      if (!own_gradient) continue;
      const T beta = covers ? T(0) : T(1);
      if (turned) {
        AddOuter<T>(level_, factor, a, d, beta, ViewOf(weight, in, out));
      } else {
        AddOuter<T>(level_, factor, d, a, beta, gradient.Rows(block.out_begin, block.out_count));
      }
      if (bias != nullptr) ColumnSums<T>(level_, factor, d, beta, bias + block.out_begin);
      const MatrixView<T> product =
          turned ? ViewOf(weight, in, out) : gradient.Rows(block.out_begin, block.out_count);
      if (!EdgesAreFinite(product)) FindSuspect(block, a, d);
    }
    if (!own_gradient) return Status::Ok();
    DAD_RETURN_IF_ERROR(AddIndexed(l, factor, gradient));
    DAD_RETURN_IF_ERROR(AddDense(l, factor, gradient, bias));
    result_.Deliver(out, in);
    if (bias != nullptr) bias_result_.Deliver();
    return Status::Ok();
  }

  // A value of A that is not finite spoils a whole column of DᵀA, one of D a whole row: the first
  // row and the first column tell of all of them.
  static bool EdgesAreFinite(MatrixView<T> product) {
    if (product.rows == 0 || product.cols == 0) return true;
    FiniteCheck<T> check;
    for (int64_t j = 0; j < product.cols; ++j) check.See(product.row(0)[j]);
    for (int64_t i = 0; i < product.rows; ++i) check.See(product.row(i)[0]);
    return check.all_finite();
  }

  void Suspect(int rank) {
    if (step_.report != nullptr && step_.report->suspect < 0) step_.report->suspect = rank;
  }

  void FindSuspect(const RowsBlock& block, MatrixView<T> a, MatrixView<T> d) {
    for (const RowsPiece* piece : block.pieces) {
      if (step_.report == nullptr || step_.report->suspect >= 0) return;
      const bool finite = AllFinite<T>(a.Rows(piece->row_begin, piece->rows)) &&
                          AllFinite<T>(d.Rows(piece->row_begin, piece->rows));
      if (!finite) Suspect(piece->rank);
    }
  }

  // A and D of all ranks' rows. They stay in a_[l] and d_[l] for the layer below.
  Result<std::pair<MatrixView<T>, MatrixView<T>>> Stack(size_t l, const RowsBlock& block) {
    const LayerShape& shape = layers_[l];
    const MatrixView<T> a =
        ViewOf(a_[l].Take(shape.pass ? 0 : block.rows * shape.in), block.rows, shape.in);
    const MatrixView<T> d =
        ViewOf(d_[l].Take(block.rows * block.out_count), block.rows, block.out_count);
    for (const RowsPiece* piece : block.pieces) {
      if (!shape.pass) {
        DAD_RETURN_IF_ERROR(Decode(piece->a, piece->rows * shape.in, a.row(piece->row_begin)));
      }
      if (!piece->has_d) continue;
      T* rows = d.row(piece->row_begin);
      DAD_RETURN_IF_ERROR(Decode(piece->d, piece->rows * block.out_count, rows));
      const T scale = static_cast<T>(piece->scale);
      if (scale == T(1)) continue;
      for (int64_t i = 0; i < piece->rows * block.out_count; ++i) rows[i] *= scale;
    }
    DAD_RETURN_IF_ERROR(Derive(l, block, d));
    return std::make_pair(a, d);
  }

  // D of the pieces that came without, from the layer above: runs of rows that follow each
  // other in both layers at once, so that mostly it is one product.
  Status Derive(size_t l, const RowsBlock& block, MatrixView<T> d) {
    const RowsPiece* first = nullptr;  // of the run
    const RowsPiece* first_above = nullptr;
    int64_t rows = 0;
    for (const RowsPiece* piece : block.pieces) {
      if (piece->has_d) continue;
      const RowsPiece* above = l + 1 < layers_.size() ? Above(l, *piece) : nullptr;
      if (above == nullptr) return Malformed(piece->rank, "no D, and none follows from above");
      const bool goes_on = first != nullptr && piece->row_begin == first->row_begin + rows &&
                           above->row_begin == first_above->row_begin + rows;
      if (!goes_on) {
        if (first != nullptr) DeriveRun(l, *first, *first_above, rows, d);
        first = piece;
        first_above = above;
        rows = 0;
      }
      rows += piece->rows;
    }
    if (first != nullptr) DeriveRun(l, *first, *first_above, rows, d);
    return Status::Ok();
  }

  const RowsPiece* Above(size_t l, const RowsPiece& piece) const {
    for (const RowsPiece& above : pieces_[l + 1].rows) {
      if (above.rank == piece.rank && above.ordinal == piece.ordinal) {
        return above.rows == piece.rows ? &above : nullptr;
      }
    }
    return nullptr;
  }

  void DeriveRun(size_t l, const RowsPiece& piece, const RowsPiece& above, int64_t rows,
                 MatrixView<T> d) {
    const LayerShape& shape = layers_[l];
    const LayerShape& upper = layers_[l + 1];
    const MatrixView<T> run = d.Rows(piece.row_begin, rows);
    const MatrixView<T> d_above =
        ViewOf(d_[l + 1].Take(0) + above.row_begin * upper.out, rows, upper.out);
    if (step_.mine->layers[l + 1].transposed) {
      MultiplyTransposed<T>(level_, d_above, Weight(l + 1), run);
    } else {
      Multiply<T>(level_, d_above, Weight(l + 1), run);
    }
    const int64_t count = rows * shape.out;
    if (upper.pass) {
      // Bits are padded to bytes for each piece.
      for (const RowsPiece& part : pieces_[l + 1].rows) {
        if (part.row_begin < above.row_begin || part.row_begin >= above.row_begin + rows) continue;
        std::vector<std::byte> own;
        if (part.a.own != nullptr) own = PositiveBits<T>(*part.a.own);
        const ByteSpan bits = part.a.own != nullptr ? ByteSpan(own) : part.bits;
        MultiplyByBits(shape.activation, shape.slope, reinterpret_cast<const uint8_t*>(bits.data()),
                       part.rows * shape.out, run.row(part.row_begin - above.row_begin));
      }
    } else if (DerivativeFromOutput(shape.activation)) {
      const T* y = a_[l + 1].Take(0) + above.row_begin * upper.in;
      MultiplyByDerivative(shape.activation, shape.slope, y, count, run.data);
    } else {
      const MatrixView<T> a = ViewOf(a_[l].Take(0) + piece.row_begin * shape.in, rows, shape.in);
      const MatrixView<T> h = ViewOf(h_.Take(count), rows, shape.out);
      if (step_.mine->layers[l].transposed) {
        Multiply<T>(level_, a, Weight(l), h);
      } else {
        MultiplyTransposed<T>(level_, a, Weight(l), h);
      }
      if (shape.bias) {
        std::vector<T> bias(static_cast<size_t>(shape.out));
        ConvertTo(step_.mine->layers[l].bias, bias.data());
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < shape.out; ++j) h.row(i)[j] += bias[static_cast<size_t>(j)];
        }
      }
      MultiplyByDerivative(shape.activation, shape.slope, h.data, count, run.data);
    }
  }

  // As it lies: out × in, or in × out.
  MatrixView<const T> Weight(size_t l) {
    const TensorView& weight = step_.mine->layers[l].weight;
    const bool transposed = step_.mine->layers[l].transposed;
    const int64_t rows = transposed ? layers_[l].in : layers_[l].out;
    const int64_t cols = transposed ? layers_[l].out : layers_[l].in;
    if (weight.dtype == DTypeOf<T>()) return ViewOf(static_cast<const T*>(weight.data), rows, cols);
    T* wide = weight_.Take(rows * cols);
    ConvertTo(weight, wide);
    return ViewOf(static_cast<const T*>(wide), rows, cols);
  }

  Status AddIndexed(size_t l, T factor, MatrixView<T> gradient) {
    for (const IndexedPiece& piece : pieces_[l].indexed) {
      T* x = h_.Take(piece.rows * gradient.cols);
      DAD_RETURN_IF_ERROR(Decode(piece.x, piece.rows * gradient.cols, x));
      const T scale = factor * static_cast<T>(piece.scale);
      FiniteCheck<T> check;
      for (int64_t k = 0; k < piece.rows; ++k) {
        int64_t index = 0;
        if (piece.own_index != nullptr) {
          index = static_cast<const int64_t*>(piece.own_index->data)[k];
        } else {
          uint32_t value = 0;
          std::memcpy(&value, piece.index.data() + static_cast<size_t>(k) * sizeof value,
                      sizeof value);
          index = value;
        }
        if (index < 0 || index >= gradient.rows) {
          return Malformed(-1, "an index outside of the tensor");
        }
        T* row = gradient.row(index);
        for (int64_t j = 0; j < gradient.cols; ++j) {
          const T value = x[k * gradient.cols + j];
          check.See(value);
          row[j] += scale * value;
        }
      }
      if (!check.all_finite()) Suspect(piece.rank);
    }
    return Status::Ok();
  }

  Status AddDense(size_t l, T factor, MatrixView<T> gradient, T* bias) {
    for (const DensePiece& piece : pieces_[l].dense) {
      const T scale = factor * static_cast<T>(piece.scale);
      auto add = [&](const FactorValues& values, int64_t count, T* to) -> Status {
        T* from = h_.Take(count);
        DAD_RETURN_IF_ERROR(Decode(values, count, from));
        FiniteCheck<T> check;
        for (int64_t i = 0; i < count; ++i) {
          check.See(from[i]);
          to[i] += scale * from[i];
        }
        if (!check.all_finite()) Suspect(piece.rank);
        return Status::Ok();
      };
      DAD_RETURN_IF_ERROR(add(piece.weight, gradient.rows * gradient.cols, gradient.data));
      if (bias != nullptr) DAD_RETURN_IF_ERROR(add(piece.bias, gradient.rows, bias));
    }
    return Status::Ok();
  }

  const TensorSpec spec_;
  const std::vector<LayerShape> layers_;  // from the lowest to the top
  const bool bf16_;
  const CpuLevel level_;
  const bool pack_;
  Group group_;
  StepInput step_;
  std::shared_ptr<ShareWriter> share_;  // messages may outlive the step
  std::deque<std::vector<uint16_t>> rounded_;
  std::vector<LayerInput> rounded_input_;
  const std::vector<LayerInput>* own_ = nullptr;
  std::vector<LayerPieces> pieces_;
  bool replan_ = false;
  // Kept between steps.
  std::vector<Scratch<T>> a_;
  std::vector<Scratch<T>> d_;
  Scratch<T> h_;
  Scratch<T> weight_;
  LayerResult<T> result_;
  LayerResult<T> bias_result_;
};

Status CheckChain(const TensorSpec& spec, const std::vector<LayerShape>& layers) {
  auto wrong = [&](const std::string& what) { return WrongMethod(spec, what); };
  if (layers.empty()) return wrong("no layer");
  DAD_RETURN_IF_ERROR(CheckSummable(spec, "factors"));
  for (size_t l = 0; l + 1 < layers.size(); ++l) {
    if (layers[l].out != layers[l + 1].in) return wrong("the layers do not form a chain");
    if (layers[l + 1].pass && !DerivativeIsOneBit(layers[l].activation)) {
      return wrong("a layer that only passes D on needs a ReLU below it");
    }
  }
  return Status::Ok();
}

}  // namespace

int64_t FactorShareBytes(const TensorSpec& spec) {
  const Method& method = spec.method;
  const int64_t rows = method.Integer("rows", 0).ok() ? method.Integer("rows", 0).value() : 0;
  int64_t values = method.layers().empty() ? 0 : rows * method.layers().back().out;
  for (const LayerShape& layer : method.layers()) {
    values += layer.pass ? rows * layer.in / 32 : rows * layer.in;
  }
  return values *
         (method.Text("wire", "fp32") == "bf16" ? 2 : static_cast<int64_t>(SizeOf(spec.dtype)));
}

Result<std::unique_ptr<Exchange>> MakeFactorExchange(const TensorSpec& spec,
                                                     const ExchangeEnv& env) {
  const Method& method = spec.method;
  DAD_RETURN_IF_ERROR(CheckChain(spec, method.layers()));
  const bool bf16 = method.Text("wire", "fp32") == "bf16";
  return MakeForType<FactorExchange>(spec, method.layers(), bf16, env);
}

}  // namespace dad
