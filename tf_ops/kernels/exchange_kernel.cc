// The exchange of weights and biases, each by the method that the plan has for it.
#include <cstring>
#include <utility>

#include "tf_ops/kernels/method_kernel.h"

namespace dad_tensorflow {
namespace {

// Pairs of weights and biases.
class Exchange final : public MethodKernel {
 public:
  using MethodKernel::MethodKernel;

 private:
  Status AddRequests(const Board& board, Run* run) const override {
    for (const Part& part : parts()) {
      const Status status = AddPair(part, board.Ways(part.pair), run);
      if (!status.ok()) return status;
    }
    return Status::Ok();
  }
  Status AddPair(const Part& part, const PairWays& ways, Run* run) const;
  // One tensor, or a layer, formed.
  Status AddFormed(const Way& way, const dad::TensorView& gradient, const dad::TensorView& result,
                   const Note& whose, Run* run) const;
};

Status Exchange::AddFormed(const Way& way, const dad::TensorView& gradient,
                           const dad::TensorView& result, const Note& whose, Run* run) const {
  Request request = MakeRequest(way, static_cast<size_t>(run->output) - 1, run->loss_scale);
  Contribution mine;
  if (way.by_layer) {
    LayerInput layer;
    layer.dense = gradient;
    layer.output = result;
    mine.input.dtype = result.dtype;
    mine.input.shape = {Elements(result)};
    mine.layers.push_back(std::move(layer));
  } else {
    mine.input = gradient;
    mine.output = result;
  }
  request.tensors.push_back(std::move(mine));
  run->requests.push_back(std::move(request));
  run->notes.push_back(whose);
  return Status::Ok();
}

Status Exchange::AddPair(const Part& part, const PairWays& ways, Run* run) const {
  const bool by_layer = ways.weight.by_layer;
  const bool sends_rows = dad::ExchangesRows(ways.weight.method);
  LayerInput layer;
  int64_t rows = 0;
  const auto num_rows = static_cast<size_t>(part.rows);
  if (part.begins.size() < num_rows ||
      part.samples.size() < num_rows + static_cast<size_t>(part.indexed)) {
    return Status::Internal("an op's parts have fewer places than segments");
  }
  for (int i = 0; i < part.rows; ++i) {
    dad::RowsSegment segment;
    segment.a = ViewOf(run->NextInput());
    segment.d = sends_rows ? run->NextDelta() : ViewOf(run->NextInput());
    segment.out_begin = part.begins[static_cast<size_t>(i)];
    rows += segment.a.shape[0];
    segment.samples = run->NextSamples(part.samples[static_cast<size_t>(i)], segment.a.shape[0]);
    // An empty batch has no rows.
    if (segment.a.shape[0] > 0) layer.rows.push_back(std::move(segment));
  }
  for (int i = 0; i < part.indexed; ++i) {
    dad::IndexedSegment segment;
    segment.index = ViewOf(run->NextInput());
    segment.x = ViewOf(run->NextInput());
    rows += segment.x.shape[0];
    segment.samples =
        run->NextSamples(part.samples[static_cast<size_t>(part.rows + i)], segment.x.shape[0]);
    if (segment.x.shape[0] > 0) layer.indexed.push_back(std::move(segment));
  }
  bool has_rows = part.rows + part.indexed > 0;
  bool has_dense = part.has_dense;
  dad::TensorView dense;
  if (part.has_dense) dense = ViewOf(run->NextInput());
  const Tensor* bias = part.has_bias ? &run->NextInput() : nullptr;
  const auto weight_name = static_cast<size_t>(run->output);
  Result<dad::TensorView> result = NewResult(run);
  if (!result.ok()) return result.status();
  dad::TensorView plain_result = result.value();  // out × in
  if (has_rows && part.forms && !ways.weight.as_rows) {
    dense = plain_result;
    if (by_layer || part.transposed) {
      if (part.transposed) std::swap(dense.shape[0], dense.shape[1]);
      Result<Tensor> formed = run->call->NewTensor(dense.dtype, dense.shape);
      if (!formed.ok()) return formed.status();
      dense = ViewOf(formed.value());
      run->call->Hold(formed.value());
      if (!by_layer) {
        plain_result = dense;
        run->turned.push_back({std::move(formed).value(), run->output - 1});
      }
    }
    run->products.push_back({std::exchange(layer, {}), dense});
    has_rows = false;
    has_dense = true;
  }
  if (!by_layer) {
    if (has_rows || !has_dense) {
      return Status::Internal("the plan changed within a step of \"" + name(weight_name) + '"');
    }
    const Status status = AddFormed(ways.weight, dense, plain_result, {.pair = part.pair}, run);
    if (!status.ok()) return status;
  }
  dad::TensorView bias_result;
  const bool rides = by_layer && ways.bias_rides && bias != nullptr;
  if (bias != nullptr) {
    Result<dad::TensorView> second = NewResult(run);
    if (!second.ok()) return second.status();
    bias_result = second.value();
    if (!rides) {
      const Status status = AddFormed(ways.bias, ViewOf(*bias), bias_result,
                                      {.pair = part.pair, .of_bias = true}, run);
      if (!status.ok()) return status;
    }
  }
  if (!by_layer) return Status::Ok();

  Request request = MakeRequest(ways.weight, weight_name, run->loss_scale);
  Contribution mine;
  layer.dense = dense;
  layer.output = result.value();
  layer.transposed = part.transposed;
  int64_t elements = Elements(layer.output);
  if (rides) {
    layer.output_bias = bias_result;
    elements += Elements(bias_result);
    if (has_dense && !has_rows) {
      layer.dense_bias = ViewOf(*bias);
    } else if (has_dense) {
      // The rows have all of the bias's gradient.
      Tensor zeros(bias->dtype(), bias->shape());
      std::memset(zeros.data(), 0, zeros.TotalBytes());
      run->call->Hold(zeros);
      layer.dense_bias = ViewOf(zeros);
    }
  }
  mine.input.dtype = layer.output.dtype;
  mine.input.shape = {elements};
  // A graph that cannot give what was planned for, or gives more of it.
  mine.replan = ways.weight.as_rows && (!has_rows || rows > ways.weight.most_rows);
  mine.layers.push_back(std::move(layer));
  request.tensors.push_back(std::move(mine));
  run->requests.push_back(std::move(request));
  run->notes.push_back({.pair = part.pair});
  return Status::Ok();
}

REGISTER_KERNEL_BUILDER(Name("DadExchange").Device(tensorflow::DEVICE_CPU), Exchange);

}  // namespace
}  // namespace dad_tensorflow
