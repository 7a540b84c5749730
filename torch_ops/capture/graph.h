// Reading autograd's graph: which parameter a weight comes from, and which linear maps follow each
// other with only an activation between them.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <mutex>
#include <optional>

#include "torch_ops/capture/registry.h"

namespace dad_torch {

// A tensor that an op was given, as a part of a tracked parameter.
struct Use {
  EntryPtr entry;
  int64_t begin = 0;  // its first row in the parameter
  bool whole = true;  // it has all rows
};

// Follows the history of `tensor` through autocast's copy and blocks of rows to a tracked
// parameter. Nothing if it leads elsewhere.
std::optional<Use> FindUse(const at::Tensor& tensor);

// A tracked vector that `tensor` has several times over: instance_norm calls batch_norm so.
struct RepeatedUse {
  EntryPtr entry;
  int64_t times = 1;
};
std::optional<RepeatedUse> FindRepeatedUse(const at::Tensor& tensor);

// The leading dimension that a matrix had before it was reshaped to one: its rows are then in that
// many equal blocks. As many as there are rows if it was not.
struct LeadingDimension {
  int64_t size = 0;
  bool was_behind = false;  // another dimension was in front of it before
};
LeadingDimension LeadingBeforeReshape(const at::Tensor& matrix);

// Whether somebody looks at, or changes, the gradient on its way along `edge` to the parameter:
// then it must exist.
bool HasHooks(const torch::autograd::Edge& edge);

// An activation in the graph, and what is below it.
struct ActivationMatch {
  Activation activation = Activation::kRelu;
  double slope = 0.0;
  torch::autograd::Node* node = nullptr;
  torch::autograd::Node* below = nullptr;  // reshapes skipped
};
// The activation whose output, perhaps reshaped, `input` is.
std::optional<ActivationMatch> MatchActivation(const at::Tensor& input);

// One upper op, an activation and one lower op: proves in each backward pass that the gradient went
// from one to the next untouched. Holding on to the gradient keeps autograd from adding to it in
// place, so what arrives is the same memory with the same version only if nothing was added. A
// residual branch, a second use, a hook that changes it: each makes another tensor of it.
class ChainLink {
 public:
  // A link through the activation, which calls it during backward.
  static std::shared_ptr<ChainLink> Through(const ActivationMatch& match);

  // The activation that it goes through; only to be compared.
  const torch::autograd::Node* activation() const { return activation_; }

  // The upper op returns `grad`; it has kept its segment at `place`.
  void Offer(const at::Tensor& grad, int upper_id, Place place);
  // The activation got `grad` and returns `result`.
  void Pass(const at::Tensor& grad, const at::Tensor& result);
  // The lower op got `grad`: the link, if it is proven.
  std::optional<SegmentLink> Accept(const at::Tensor& grad);

 private:
  enum class Stage { kEmpty, kOffered, kPassed };
  bool Holds(Stage stage, const at::Tensor& grad) const;
  void Hold(Stage stage, const at::Tensor& grad);

  const torch::autograd::Node* activation_ = nullptr;
  std::mutex mutex_;
  SegmentLink link_;
  Stage stage_ = Stage::kEmpty;
  at::Tensor held_;
  int64_t version_ = 0;
  int task_ = -1;  // the backward pass
};

}  // namespace dad_torch
