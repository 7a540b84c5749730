// What the autograd nodes and kernels of captured ops have in common.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>

#include "torch_ops/capture/graph.h"

namespace dad_torch {

// Whether an op's use of a weight may be captured, whatever parameter it comes from. `others` are
// the op's other floating point tensors; undefined ones do not matter. `mixed`: the op takes
// tensors of different types.
bool MayCapture(const at::Tensor& weight, std::initializer_list<const at::Tensor*> others,
                bool mixed = false);
// Which parameter an op is about to use as its weight, if that is to be captured. Nothing: let
// torch do it.
std::optional<Use> UseToCapture(const at::Tensor& weight,
                                std::initializer_list<const at::Tensor*> others,
                                bool mixed = false);

// Notes that a use of `weight`, if it is tracked, is not captured.
void DeclineUse(const at::Tensor& weight, const char* reason);

// The keys with which an op is called again, from a kernel of ours at its autograd key, to run
// torch's own autograd kernel: that one is registered for every backend at once, and we stand
// before it for one backend only.
c10::DispatchKeySet TorchAutograd(c10::DispatchKeySet keys);

// Whether what an op was given may be the user's own memory: data, not the result of an op.
bool MayBeUsers(const at::Tensor& tensor);

// Which rows are of which sample: outer × samples × inner, in row-major order.
//
// An op's input has its samples in front, as a rule; then outer is 1. But attention runs with the
// positions in front (T × B × E, also with batch_first=True), and its output projection with a
// matrix of T·B rows. What tells is the first op of the batch, whose leading dimension is the
// number of samples: if it is not that of this op, but what the next dimension is, that one is the
// samples'. Where T = B the leading dimension wins, unless it is seen to have been behind another
// one before.
struct RowLayout {
  int64_t outer = 1;
  int64_t samples = 1;
  int64_t inner = 1;
  bool known = true;   // else there are so many samples, but in any order
  uint64_t batch = 0;  // Segment::batch
};

// The layout of an op's input, of which the first `row_dims` dimensions make rows.
RowLayout LayoutOf(const at::Tensor& input, int64_t row_dims);
// One with `samples` in front. `begins`: they may tell how many samples the batch has.
RowLayout SamplesInFront(int64_t samples, bool begins = true);
// The rows of a matrix, sample by sample.
at::Tensor BySample(const at::Tensor& matrix, const RowLayout& layout);

// A node that keeps segments.
class CapturingNode : public torch::autograd::Node {
 protected:
  CapturingNode() : op_number_(NextOpNumber()) {}

  // Why the gradient at this edge must be formed in this backward pass; null if it need not be.
  const char* WhyDense(const at::Tensor& grad, size_t edge) const;

  Place KeepFor(Entry& entry, Segment segment) {
    return dad_torch::Keep(entry, std::move(segment), op_number_);
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "compiled autograd cannot keep the rows of a layer's gradient "
                                "(compression=); compile the model instead");
  }

 private:
  const uint64_t op_number_;
};

// One of an op with a weight, and perhaps a bias that rides with it.
class CapturedNode : public CapturingNode {
 public:
  CapturedNode(Use weight, EntryPtr bias) : weight_(std::move(weight)), bias_(std::move(bias)) {}

 protected:
  static constexpr size_t kNoEdge = ~size_t{0};

  struct Todo {
    bool keep = false;          // store a segment
    bool by_sample = false;     // with the rows of a sample together
    bool keep_bias = false;     // which is about the bias too
    bool dense_weight = false;  // return the gradient
    bool dense_bias = false;
  };

  // What this backward pass is to do about the weight and the bias, which are at these edges.
  Todo Decide(const at::Tensor& grad, size_t weight_edge, size_t bias_edge);

  Place Keep(Segment segment) {
    segment.samples = layout_.samples;
    segment.batch = layout_.batch;
    return KeepFor(*weight_.entry, std::move(segment));
  }

  const Use weight_;
  const EntryPtr bias_;  // null unless it rides with the weight
  RowLayout layout_;
};

// The bias's entry if it rides with the weight here.
EntryPtr BiasToCapture(const Use& weight, int64_t rows, const at::Tensor& bias);

}  // namespace dad_torch
