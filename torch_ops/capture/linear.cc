// aten::linear with a tracked weight: y = x Wᵀ + b. F.linear, nn.Linear, attention's projections
// and the cells of recurrent nets all come here.
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch_ops/capture/node.h"
#include "torch_ops/capture/rows.h"

namespace dad_torch {

namespace {

namespace ag = torch::autograd;

class CapturedLinear final : public CapturedNode {
 public:
  enum : size_t { kInput, kWeight, kBias };

  CapturedLinear(Use weight, EntryPtr bias, const at::Tensor& x, const at::Tensor& w, bool any_bias)
      : CapturedNode(std::move(weight), std::move(bias)),
        x_(x, /*is_output=*/false),
        users_memory_(MayBeUsers(x)),
        any_bias_(any_bias),
        in_(w.size(1)),
        out_(w.size(0)) {
    if (x.requires_grad()) w_ = ag::SavedVariable(w, /*is_output=*/false);
    layout_ = LayoutOf(x, x.dim() - 1);
  }

  std::string name() const override { return "DadLinearBackward"; }

  ag::variable_list apply(ag::variable_list&& grads) override;
  void release_variables() override {
    std::lock_guard lock(mutex_);
    x_.reset_data();
    w_.reset_data();
  }
  void release_resources() override {
    x_ = {};
    w_ = {};
    up_.reset();
    down_.reset();
    Node::release_resources();
  }

  // Looks for the op whose output, through an activation, is this one's input `x`.
  void LinkTo(const at::Tensor& x);

 private:
  std::shared_ptr<ChainLink> LinkFromAbove(const ActivationMatch& match);
  std::optional<SegmentLink> ProvenLink(const at::Tensor& grad);

  ag::SavedVariable x_;
  ag::SavedVariable w_;
  const bool users_memory_;
  const bool any_bias_;
  const int64_t in_;
  const int64_t out_;
  std::shared_ptr<ChainLink> down_;  // to the op below
  std::shared_ptr<ChainLink> up_;    // to the op above: the one that asked last
};

void CapturedLinear::LinkTo(const at::Tensor& x) {
  if (!weight_.whole) return;
  const auto match = MatchActivation(x);
  if (!match || typeid(*match->below) != typeid(CapturedLinear)) return;
  auto& lower = static_cast<CapturedLinear&>(*match->below);
  if (lower.weight_.whole && lower.out_ == in_) down_ = lower.LinkFromAbove(*match);
}

std::shared_ptr<ChainLink> CapturedLinear::LinkFromAbove(const ActivationMatch& match) {
  // φ' of these is computed from A Wᵀ + b, so b must be known to whoever has the segment.
  const bool needs_bias = match.activation == Activation::kGelu ||
                          match.activation == Activation::kGeluTanh ||
                          match.activation == Activation::kSilu;
  if (needs_bias && any_bias_ && !bias_) return nullptr;
  std::lock_guard lock(mutex_);
  if (!up_ || up_->activation() != match.node) up_ = ChainLink::Through(match);
  return up_;
}

std::optional<SegmentLink> CapturedLinear::ProvenLink(const at::Tensor& grad) {
  return up_ ? up_->Accept(grad) : std::nullopt;
}

ag::variable_list CapturedLinear::apply(ag::variable_list&& grads) {
  std::lock_guard lock(mutex_);
  ag::variable_list result(3);
  const at::Tensor& grad = grads[0];
  if (!grad.defined()) return result;
  const Todo todo = Decide(grad, kWeight, kBias);
  std::optional<SegmentLink> link = ProvenLink(grad);

  const at::Tensor x = x_.unpack();
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  const at::Tensor d = grad.reshape({rows, out_});
  if (task_should_compute_output(kInput)) {
    result[kInput] = d.mm(w_.unpack()).reshape(x.sizes());
  }
  if (todo.keep || todo.dense_weight) {
    const at::Tensor a = x.reshape({rows, in_});
    if (todo.dense_weight) result[kWeight] = d.t().mm(a);
    if (todo.keep) {
      Segment segment;
      const bool reorder = todo.by_sample && layout_.outer > 1;
      segment.a = ForSegment(reorder ? BySample(a, layout_) : a, users_memory_);
      segment.d = ForSegment(reorder ? BySample(d, layout_) : d, /*others_memory=*/false);
      segment.even = layout_.known && (reorder || layout_.outer == 1);
      segment.out_begin = weight_.begin;
      segment.has_bias = todo.keep_bias;
      if (!reorder) segment.link = std::move(link);
      const Place place = Keep(std::move(segment));
      if (down_ && !reorder && result[kInput].defined()) {
        down_->Offer(result[kInput], weight_.entry->id, place);
      }
    }
  }
  if (todo.dense_bias) result[kBias] = d.sum(0);
  return result;
}

at::Tensor Linear(const at::Tensor& x, const at::Tensor& w,
                  const std::optional<at::Tensor>& optional_bias) {
  if (CaptureIdle()) return at::native::linear(x, w, optional_bias);
  const at::Tensor bias = optional_bias.value_or(at::Tensor());
  std::optional<Use> use = UseToCapture(w, {&x, &bias});
  const bool ordinary = use && w.dim() == 2 && x.dim() >= 1 && x.size(-1) == w.size(1) &&
                        (!bias.defined() || (bias.dim() == 1 && bias.size(0) == w.size(0)));
  if (!ordinary) return at::native::linear(x, w, optional_bias);

  EntryPtr folded = BiasToCapture(*use, w.size(0), bias);
  auto node =
      c10::make_intrusive<CapturedLinear>(std::move(*use), std::move(folded), x, w, bias.defined());
  node->set_next_edges(ag::collect_next_edges(x, w, bias));
  node->LinkTo(x);
  at::Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    y = at::native::linear(x, w, optional_bias);
  }
  ag::set_history(y, node);
  return y;
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) { m.impl("linear", &Linear); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("linear", &Linear); }

}  // namespace

}  // namespace dad_torch
