// Submits layers as factors: what capture.h kept becomes a contribution.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch_ops/capture/capture.h"
#include "torch_ops/ops/collective.h"

namespace dad_torch {

// One layer of a request. All tensors are contiguous.
struct LayerParts {
  std::vector<Segment> segments;
  bool derive = false;              // leave D out: it follows from the layer above
  std::optional<at::Tensor> dense;  // what autograd added up by itself
  std::optional<at::Tensor> dense_bias;
  std::optional<at::Tensor> output;  // none: the layer only passes D on
  std::optional<at::Tensor> output_bias;
  std::optional<at::Tensor> weight;  // of a chain
  std::optional<at::Tensor> bias;
  // float32 or float64, with as many elements as `dense` and `dense_bias`: the sum of the squares
  // of their parts by micro-batches.
  std::optional<at::Tensor> dense_square;
  std::optional<at::Tensor> dense_bias_square;
};

struct LayersRequest : RequestTerms {
  std::vector<LayerParts> layers;
  dad::DType dtype = dad::DType::kFloat32;
  bool replan = false;  // this rank wants a new plan
};

// The results of the pending collective are the outputs in order, weights before biases.
dad::Result<std::unique_ptr<Pending>> StartLayers(LayersRequest request);

}  // namespace dad_torch
