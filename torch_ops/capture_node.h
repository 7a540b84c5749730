// What the autograd nodes and kernels of captured ops have in common.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>

#include "capture_graph.h"

namespace dad_torch {

// Which parameter an op is about to use as its weight, if that is to be captured. Nothing: let
// torch do it. `others` are the op's other floating point tensors; undefined ones do not matter.
std::optional<Use> UseToCapture(const at::Tensor& weight,
                                std::initializer_list<const at::Tensor*> others);

// Notes that a use of `weight`, if it is tracked, is not captured.
void DeclineUse(const at::Tensor& weight, const char* reason);

// The keys with which an op is called again, from a kernel of ours at its autograd key, to run
// torch's own autograd kernel: that one is registered for every backend at once, and we stand
// before it for one backend only.
c10::DispatchKeySet TorchAutograd(c10::DispatchKeySet keys);

// Whether what an op was given may be the user's own memory: data, not the result of an op.
bool MayBeUsers(const at::Tensor& tensor);

class CapturedNode : public torch::autograd::Node {
 public:
  CapturedNode(Use weight, EntryPtr bias)
      : weight_(std::move(weight)), bias_(std::move(bias)), op_number_(NextOpNumber()) {}

 protected:
  static constexpr size_t kNoEdge = ~size_t{0};

  struct Todo {
    bool keep = false;          // store a segment
    bool keep_bias = false;     // which is about the bias too
    bool dense_weight = false;  // return the gradient
    bool dense_bias = false;
  };
  void compiled_args(torch::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "compiled autograd cannot keep the rows of a layer's gradient "
                                "(compression=); compile the model instead");
  }

  // What this backward pass is to do about the weight and the bias, which are at these edges.
  Todo Decide(const at::Tensor& grad, size_t weight_edge, size_t bias_edge);

  Place Keep(Segment segment) {
    segment.samples = samples_;
    return dad_torch::Keep(*weight_.entry, std::move(segment), op_number_);
  }

  const Use weight_;
  const EntryPtr bias_;  // null unless it rides with the weight
  int64_t samples_ = 1;

 private:
  const char* WhyDense(const at::Tensor& grad, size_t weight_edge) const;
  const uint64_t op_number_;
};

// The bias's entry if it rides with the weight here.
EntryPtr BiasToCapture(const Use& weight, int64_t rows, const at::Tensor& bias);

}  // namespace dad_torch
