#include "torch_ops/ops/layers.h"

#include "dad/engine.h"
#include "torch_ops/ops/tensor_adapter.h"

namespace dad_torch {

using dad::Status;

namespace {

dad::TensorView ViewOrNothing(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? ViewOf(*tensor) : dad::TensorView();
}

// For the core, which takes adjacent rows, as many of each sample: 0 where it is not so.
int64_t EvenSamples(const Segment& segment, int64_t rows) {
  const bool even = segment.even && segment.samples > 0 && rows % segment.samples == 0;
  return even ? segment.samples : 0;
}

Status CheckSquares(const std::string& name, const std::optional<at::Tensor>& square,
                    const std::optional<at::Tensor>& dense) {
  if (!square.has_value() || !square->defined()) return Status::Ok();
  const at::ScalarType type = square->scalar_type();
  if ((type != at::kFloat && type != at::kDouble) || !square->is_contiguous()) {
    return Status::InvalidArgument('"' + name +
                                   "\": squares come as contiguous float32 or float64");
  }
  if (!dense.has_value() || !dense->defined() || dense->numel() != square->numel()) {
    return Status::InvalidArgument('"' + name +
                                   "\": squares without the gradient that they belong to");
  }
  return Status::Ok();
}

}  // namespace

dad::Result<std::unique_ptr<Pending>> StartLayers(LayersRequest request) {
  auto engine = dad::ProcessEngine();
  if (!engine) return Status::InvalidArgument("dad has not been initialized; call init() first");
  dad::Request core;
  core.name = std::move(request.name);
  core.method = std::move(request.method);
  core.kind = dad::OpKind::kAllReduce;
  core.op = request.op;
  core.prescale = request.prescale;
  core.postscale = request.postscale;
  core.process_set = request.process_set;
  core.stream = request.stream;
  dad::Contribution mine;
  mine.scale = request.scale;
  mine.replan = request.replan;
  mine.input.dtype = request.dtype;
  int64_t elements = 0;
  std::vector<at::Tensor> outputs;
  for (const LayerParts& parts : request.layers) {
    for (const Status& status :
         {CheckSquares(core.name, parts.dense_square, parts.dense),
          CheckSquares(core.name, parts.dense_bias_square, parts.dense_bias)}) {
      if (!status.ok()) return status;
    }
    dad::LayerInput layer;
    for (const Segment& segment : parts.segments) {
      if (segment.kind == SegmentKind::kIndexed) {
        layer.indexed.push_back({ViewOf(segment.index), ViewOf(segment.x),
                                 EvenSamples(segment, segment.index.size(0))});
        continue;
      }
      dad::RowsSegment rows;
      rows.a = ViewOf(segment.a);
      if (!parts.derive) rows.d = ViewOf(segment.d);
      rows.out_begin = segment.out_begin;
      rows.samples = EvenSamples(segment, segment.a.size(0));
      layer.rows.push_back(std::move(rows));
    }
    layer.dense = ViewOrNothing(parts.dense);
    layer.dense_bias = ViewOrNothing(parts.dense_bias);
    layer.dense_square = ViewOrNothing(parts.dense_square);
    layer.dense_bias_square = ViewOrNothing(parts.dense_bias_square);
    layer.output = ViewOrNothing(parts.output);
    layer.output_bias = ViewOrNothing(parts.output_bias);
    layer.weight = ViewOrNothing(parts.weight);
    layer.bias = ViewOrNothing(parts.bias);
    if (parts.output.has_value()) {
      elements += parts.output->numel();
      outputs.push_back(*parts.output);
    }
    if (parts.output_bias.has_value()) {
      elements += parts.output_bias->numel();
      outputs.push_back(*parts.output_bias);
    }
    mine.layers.push_back(std::move(layer));
  }
  mine.input.shape = {elements};
  if (!outputs.empty() && outputs[0].device().is_cuda()) {
    mine.input.device = dad::DeviceType::kCuda;
    mine.input.device_index = outputs[0].device().index();
  }
  core.tensors.push_back(std::move(mine));
  core.keep_alive = std::make_shared<std::vector<LayerParts>>(std::move(request.layers));
  return Pending::Submit(std::move(core), std::move(outputs));
}

}  // namespace dad_torch
