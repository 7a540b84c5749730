#include "runtime/hierarchy/host_pieces.h"

#include <deque>
#include <memory>
#include <string>

#include "exchange/layer/form_gradient.h"
#include "exchange/method_table.h"
#include "linalg/reduce.h"
#include "util/aligned_buffer.h"

namespace dad {
namespace {

Status Wrong(const Request& request, const std::string& why) {
  return Status::InvalidArgument("\"" + request.name + "\": " + why);
}

// The pieces of a host's sum for ranks that have it in another form: a gradient that comes in rows,
// one with a weight of its own, and the squares of samples that a method looks at, which have to be
// added up beside it.
class Formed {
 public:
  Status Form(const Request& request, const LayerShape& shape, Squares squares, double scale,
              LayerInput& layer) {
    LayerInput formed;
    formed.output = layer.output;
    formed.output_bias = layer.output_bias;
    formed.transposed = layer.transposed;
    formed.dense = New(layer.output, layer.output.dtype);
    if (shape.bias) formed.dense_bias = New(layer.output_bias, layer.output_bias.dtype);
    if (squares != Squares::kNone) {
      const DType wide = layer.output.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
      formed.dense_square = New(layer.output, wide);
      if (shape.bias) formed.dense_bias_square = New(layer.output_bias, wide);
    }
    if (request.tensors[0].input.device != DeviceType::kCpu) {
      return Wrong(request, "rows and weights on a device cannot be added up inside a host");
    }
    FormGradient(shape, layer, scale, squares == Squares::kOfSamples,
                 {formed.dense, formed.dense_bias, formed.dense_square, formed.dense_bias_square});
    layer = std::move(formed);
    return Status::Ok();
  }

  Status Weigh(const Request& request, Contribution& tensor) {
    if (tensor.input.device != DeviceType::kCpu || !IsFloating(tensor.input.dtype)) {
      return Wrong(request, "its weight on this rank cannot go into a host's sum");
    }
    const TensorView weighed = New(tensor.input, tensor.input.dtype);
    const void* const from[] = {tensor.input.data};
    ReduceInRankOrder(from, weighed.data, tensor.input.num_elements(), tensor.input.dtype,
                      ReduceOp::kSum, tensor.scale, 1.0, 1);
    tensor.input = weighed;
    return Status::Ok();
  }

 private:
  TensorView New(const TensorView& like, DType dtype) {
    TensorView view = like;
    view.dtype = dtype;
    view.data = memory_.emplace_back(view.num_bytes()).data();
    return view;
  }
  std::deque<AlignedBuffer> memory_;
};

bool HasRows(const LayerInput& layer) {
  return !layer.rows.empty() || !layer.indexed.empty() || layer.dense.data == nullptr;
}

Result<Squares> SquaresOf(const Method& method) {
  if (method.none()) return Squares::kNone;
  const Result<const MethodRow*> row = RowOf(method);
  if (!row.ok()) return row.status();
  return row.value()->squares == nullptr ? Squares::kNone : row.value()->squares(method);
}

}  // namespace

Result<std::vector<HostPiece>> HostPiecesOf(Request& request) {
  if (request.kind != OpKind::kAllReduce || request.op == ReduceOp::kAdasum) {
    return Wrong(request,
                 "only reductions in which the order does not matter go from host to host");
  }
  if (request.process_set != 0) return Wrong(request, "a hierarchy is for all ranks");
  const std::vector<LayerShape>& shapes = request.method.layers();
  const Result<Squares> squares = SquaresOf(request.method);
  if (!squares.ok()) return Wrong(request, squares.status().message());
  std::shared_ptr<Formed> formed = std::make_shared<Formed>();
  std::vector<HostPiece> pieces;
  for (Contribution& tensor : request.tensors) {
    if (tensor.layers.empty()) {
      if (tensor.scale != 1.0) DAD_RETURN_IF_ERROR(formed->Weigh(request, tensor));
      pieces.push_back({tensor.input, tensor.output});
    }
    const bool on_host = tensor.input.device == DeviceType::kCpu;
    for (size_t l = 0; l < tensor.layers.size(); ++l) {
      LayerInput& layer = tensor.layers[l];
      if (shapes.size() != tensor.layers.size()) {
        return Wrong(request, "its method does not say what its layers are");
      }
      // On a device, the given squares are used.
      const bool lacks_squares = squares.value() != Squares::kNone && on_host;
      if (HasRows(layer) || tensor.scale != 1.0 || lacks_squares) {
        DAD_RETURN_IF_ERROR(formed->Form(request, shapes[l], squares.value(), tensor.scale, layer));
      }
      pieces.push_back({layer.dense, layer.output});
      if (layer.transposed) pieces.back().out = shapes[l].out;
      if (layer.dense_bias.data != nullptr) pieces.push_back({layer.dense_bias, layer.output_bias});
      for (const TensorView& square : {layer.dense_square, layer.dense_bias_square}) {
        if (square.data != nullptr) pieces.push_back({square, square, false});
      }
    }
    tensor.scale = 1.0;
  }
  using Both = std::pair<std::shared_ptr<void>, std::shared_ptr<Formed>>;
  request.keep_alive = std::make_shared<Both>(std::move(request.keep_alive), std::move(formed));
  return pieces;
}

}  // namespace dad
