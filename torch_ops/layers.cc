#include "layers.h"

#include "dad/engine.h"
#include "tensor_adapter.h"

namespace dad_torch {

using dad::Status;

namespace {

dad::TensorView ViewOrNothing(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? ViewOf(*tensor) : dad::TensorView();
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
    dad::LayerInput layer;
    for (const Segment& segment : parts.segments) {
      if (segment.kind == SegmentKind::kIndexed) {
        layer.indexed.push_back({ViewOf(segment.index), ViewOf(segment.x)});
        continue;
      }
      dad::RowsSegment rows;
      rows.a = ViewOf(segment.a);
      if (!parts.derive) rows.d = ViewOf(segment.d);
      rows.out_begin = segment.out_begin;
      layer.rows.push_back(std::move(rows));
    }
    layer.dense = ViewOrNothing(parts.dense);
    layer.dense_bias = ViewOrNothing(parts.dense_bias);
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
  core.tensors.push_back(std::move(mine));
  core.keep_alive = std::make_shared<std::vector<LayerParts>>(std::move(request.layers));
  return Pending::Submit(std::move(core), std::move(outputs));
}

}  // namespace dad_torch
