// aten::embedding and aten::_embedding_bag with a tracked weight: the gradient is a few rows, each
// with its index. And the fused recurrent kernels, which are not captured, but named.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_embedding_bag_backward.h>
#include <ATen/ops/_embedding_bag_ops.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding_backward.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch_ops/capture/node.h"
#include "torch_ops/capture/rows.h"

namespace dad_torch {

namespace {

namespace ag = torch::autograd;

int64_t SamplesOf(const at::Tensor& indices) { return indices.dim() > 0 ? indices.size(0) : 1; }

class CapturedEmbedding final : public CapturedNode {
 public:
  CapturedEmbedding(Use weight, const at::Tensor& w, const at::Tensor& indices, int64_t padding_idx)
      : CapturedNode(std::move(weight), nullptr),
        indices_(indices, /*is_output=*/false),
        entries_(w.size(0)),
        dim_(w.size(1)),
        padding_idx_(padding_idx) {
    // A vector of indices may be positions, which all samples share.
    layout_ = indices.dim() > 1 ? LayoutOf(indices, indices.dim())
                                : SamplesInFront(SamplesOf(indices), /*begins=*/false);
  }

  std::string name() const override { return "DadEmbeddingBackward"; }

  ag::variable_list apply(ag::variable_list&& grads) override {
    std::lock_guard lock(mutex_);
    ag::variable_list result(1);
    const at::Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    const Todo todo = Decide(grad, 0, kNoEdge);
    const at::Tensor indices = indices_.unpack();
    if (todo.keep) {
      const int64_t rows = indices.numel();
      Segment segment = IndexedRows(indices.reshape({rows}), grad.reshape({rows, dim_}),
                                    padding_idx_, /*all_rows=*/todo.by_sample);
      if (todo.by_sample && layout_.outer > 1) {
        segment.index = BySample(segment.index.unsqueeze(1), layout_).squeeze(1);
        segment.x = BySample(segment.x, layout_);
      } else {
        segment.even = segment.even && layout_.outer == 1;
      }
      Keep(std::move(segment));
    }
    if (todo.dense_weight) {
      result[0] = at::embedding_backward(grad, indices, entries_, padding_idx_,
                                         /*scale_grad_by_freq=*/false, /*sparse=*/false);
    }
    return result;
  }
  void release_variables() override {
    std::lock_guard lock(mutex_);
    indices_.reset_data();
  }
  void release_resources() override {
    indices_ = {};
    Node::release_resources();
  }

 private:
  ag::SavedVariable indices_;
  const int64_t entries_;
  const int64_t dim_;
  const int64_t padding_idx_;
};

at::Tensor Embedding(c10::DispatchKeySet keys, const at::Tensor& w, const at::Tensor& indices,
                     c10::SymInt padding_idx, bool scale_grad_by_freq, bool sparse) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::embedding", "")
                             .typed<at::_ops::embedding::schema>();
  const auto call = [&](c10::DispatchKeySet at_keys) {
    return op.redispatch(at_keys, w, indices, padding_idx, scale_grad_by_freq, sparse);
  };
  std::optional<Use> use = UseToCapture(w, {});
  const auto padding = padding_idx.maybe_as_int();
  if (use && (scale_grad_by_freq || sparse)) {
    Decline(*use->entry, sparse ? "sparse=True" : "scale_grad_by_freq=True");
    use.reset();
  }
  if (!use || !use->whole || w.dim() != 2 || !padding) return call(TorchAutograd(keys));
  at::Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    y = call(keys & c10::after_autograd_keyset);
  }
  auto node = c10::make_intrusive<CapturedEmbedding>(std::move(*use), w, indices, *padding);
  node->set_next_edges(ag::collect_next_edges(w));
  ag::set_history(y, node);
  return y;
}

enum BagMode : int64_t { kSum = 0, kMean = 1, kMax = 2 };

struct BagOptions {
  BagMode mode;
  bool include_last_offset;
  int64_t padding_idx;
};

class CapturedBag final : public CapturedNode {
 public:
  CapturedBag(Use weight, const at::Tensor& w, const at::Tensor& indices, const at::Tensor& offsets,
              const at::Tensor& sample_weights, const std::array<at::Tensor, 3>& forward,
              BagOptions options)
      : CapturedNode(std::move(weight), nullptr),
        indices_(indices, /*is_output=*/false),
        offsets_(offsets, /*is_output=*/false),
        sample_weights_(sample_weights, /*is_output=*/false),
        forward_(forward),
        entries_(w.size(0)),
        options_(options) {
    layout_ = SamplesInFront(offsets.size(0) - (options.include_last_offset ? 1 : 0));
  }

  std::string name() const override { return "DadEmbeddingBagBackward"; }

  ag::variable_list apply(ag::variable_list&& grads) override {
    std::lock_guard lock(mutex_);
    ag::variable_list result(1);
    const at::Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    const Todo todo = Decide(grad, 0, kNoEdge);
    const at::Tensor indices = indices_.unpack();
    const at::Tensor offsets = offsets_.unpack();
    const at::Tensor sample_weights = sample_weights_.unpack();
    if (todo.keep) Keep(Rows(grad, indices, offsets, sample_weights, todo.by_sample));
    if (todo.dense_weight) {
      std::optional<at::Tensor> weights;
      if (sample_weights.defined()) weights = sample_weights;
      result[0] = at::_embedding_bag_backward(grad, indices, offsets, forward_[0], forward_[1],
                                              forward_[2], entries_,
                                              /*scale_grad_by_freq=*/false, options_.mode,
                                              /*sparse=*/false, weights, options_.padding_idx);
    }
    return result;
  }
  void release_variables() override {
    std::lock_guard lock(mutex_);
    indices_.reset_data();
    offsets_.reset_data();
    sample_weights_.reset_data();
  }
  void release_resources() override {
    indices_ = {};
    offsets_ = {};
    sample_weights_ = {};
    forward_ = {};
    Node::release_resources();
  }

 private:
  Segment Rows(const at::Tensor& grad, const at::Tensor& indices, const at::Tensor& offsets,
               const at::Tensor& sample_weights, bool by_sample) const {
    const int64_t samples = layout_.samples;
    // The bag of an index is the last one that starts at or before it; empty bags start there too.
    const at::Tensor places = at::arange(indices.size(0), offsets.options());
    const at::Tensor starts = offsets.narrow(0, 0, samples).contiguous();
    const at::Tensor bags =
        at::searchsorted(starts, places, /*out_int32=*/false, /*right=*/true).sub(1);
    at::Tensor x = grad.index_select(0, bags);
    if (options_.mode == kMean) {
      // torch divides by the number of indices in the bag that are not padding.
      const at::Tensor counted = indices.ne(options_.padding_idx).to(at::kLong);
      const at::Tensor counts =
          at::zeros({samples}, bags.options()).index_add_(0, bags, counted).clamp_min_(1);
      x = x.div(counts.index_select(0, bags).to(x.scalar_type()).unsqueeze(1));
    }
    if (sample_weights.defined()) x = x.mul(sample_weights.unsqueeze(1));
    Segment segment = IndexedRows(indices, x, options_.padding_idx, by_sample);
    segment.even = segment.even && by_sample && EqualBags(starts, indices.size(0));
    return segment;
  }

  static bool EqualBags(const at::Tensor& starts, int64_t indices) {
    const int64_t bags = starts.size(0);
    // On a device the host would have to wait for the answer.
    if (bags == 0 || indices % bags != 0 || !starts.device().is_cpu()) return false;
    return starts.equal(at::arange(bags, starts.options()).mul(indices / bags));
  }

  ag::SavedVariable indices_;
  ag::SavedVariable offsets_;
  ag::SavedVariable sample_weights_;
  std::array<at::Tensor, 3> forward_;  // what torch's own backward wants
  const int64_t entries_;
  const BagOptions options_;
};

using BagResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

const char* WhyNotBag(const Use& use, BagMode mode, bool scale_grad_by_freq, bool sparse,
                      const at::Tensor& sample_weights) {
  if (sparse) return "sparse=True";
  if (scale_grad_by_freq) return "scale_grad_by_freq=True";
  if (mode == kMax) return "mode=\"max\"";
  if (sample_weights.defined() && sample_weights.requires_grad()) {
    return "its per_sample_weights have a gradient";
  }
  return use.whole ? nullptr : "only some of its rows are used";
}

BagResult EmbeddingBag(c10::DispatchKeySet keys, const at::Tensor& w, const at::Tensor& indices,
                       const at::Tensor& offsets, bool scale_grad_by_freq, int64_t mode,
                       bool sparse, const std::optional<at::Tensor>& per_sample_weights,
                       bool include_last_offset, int64_t padding_idx) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::_embedding_bag", "")
                             .typed<at::_ops::_embedding_bag::schema>();
  const auto call = [&](c10::DispatchKeySet at_keys) {
    return op.redispatch(at_keys, w, indices, offsets, scale_grad_by_freq, mode, sparse,
                         per_sample_weights, include_last_offset, padding_idx);
  };
  const at::Tensor sample_weights = per_sample_weights.value_or(at::Tensor());
  std::optional<Use> use = UseToCapture(w, {&sample_weights});
  const BagOptions options{static_cast<BagMode>(mode), include_last_offset, padding_idx};
  if (use) {
    const char* reason = WhyNotBag(*use, options.mode, scale_grad_by_freq, sparse, sample_weights);
    if (reason) {
      Decline(*use->entry, reason);
      use.reset();
    }
  }
  if (!use || indices.dim() != 1 || w.dim() != 2) return call(TorchAutograd(keys));
  BagResult y;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    y = call(keys & c10::after_autograd_keyset);
  }
  auto node = c10::make_intrusive<CapturedBag>(
      std::move(*use), w, indices, offsets, sample_weights,
      std::array{std::get<1>(y), std::get<2>(y), std::get<3>(y)}, options);
  node->set_next_edges(ag::collect_next_edges(w));
  ag::set_history(std::get<0>(y), node);
  return y;
}

// Any op: says why the tracked ones among its tensors are not captured, and lets torch go on.
void Fused(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (!CaptureIdle()) {
    for (const c10::IValue& argument : torch::jit::last(stack, op.schema().arguments().size())) {
      if (argument.isTensor()) DeclineUse(argument.toTensor(), "fused recurrent kernel");
      if (!argument.isTensorList()) continue;
      for (const at::Tensor& tensor : argument.toTensorList()) {
        DeclineUse(tensor, "fused recurrent kernel");
      }
    }
  }
  op.redispatchBoxed(TorchAutograd(keys), stack);
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) {
  m.impl("embedding", &Embedding);
  m.impl("_embedding_bag", &EmbeddingBag);
  m.impl("mkldnn_rnn_layer", torch::CppFunction::makeFromBoxedFunction<&Fused>());
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  m.impl("embedding", &Embedding);
  m.impl("_embedding_bag", &EmbeddingBag);
  m.impl("_cudnn_rnn", torch::CppFunction::makeFromBoxedFunction<&Fused>());
}

}  // namespace

}  // namespace dad_torch
