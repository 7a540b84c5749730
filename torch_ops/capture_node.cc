#include "capture_node.h"

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

namespace dad_torch {

namespace {

using c10::DispatchKey;

// Subclasses with a dispatch of their own, tensors being traced, functorch's, lazy ones.
constexpr c10::DispatchKeySet kNotPlain({
    DispatchKey::Python,
    DispatchKey::PythonTLSSnapshot,
    DispatchKey::Functionalize,
    DispatchKey::FuncTorchBatched,
    DispatchKey::FuncTorchGradWrapper,
    DispatchKey::Batched,
    DispatchKey::Conjugate,
    DispatchKey::Negative,
    DispatchKey::ZeroTensor,
    DispatchKey::NestedTensor,
});

bool IsPlain(const at::Tensor& tensor) {
  if (tensor.key_set().has_any(kNotPlain) || tensor.layout() != at::kStrided) return false;
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16: return true;
    default: return false;
  }
}

}  // namespace

std::optional<Use> UseToCapture(const at::Tensor& weight,
                                std::initializer_list<const at::Tensor*> others) {
  if (CaptureIdle() || !at::GradMode::is_enabled() || !weight.requires_grad()) return std::nullopt;
  if (!IsPlain(weight) || weight._fw_grad(0).defined()) return std::nullopt;
  for (const at::Tensor* other : others) {
    if (!other->defined()) continue;
    if (!IsPlain(*other) || other->scalar_type() != weight.scalar_type() ||
        other->device() != weight.device() || other->_fw_grad(0).defined()) {
      return std::nullopt;
    }
  }
  std::optional<Use> use = FindUse(weight);
  if (use && use->entry->mode == CaptureMode::kOff) use.reset();
  return use;
}

void DeclineUse(const at::Tensor& weight, const char* reason) {
  if (CaptureIdle() || !weight.defined() || !weight.requires_grad()) return;
  if (const auto use = FindUse(weight)) Decline(*use->entry, reason);
}

c10::DispatchKeySet TorchAutograd(c10::DispatchKeySet keys) {
  // Python's dispatcher, when it is on, gives us all keys again, those before ours too.
  return (keys & c10::after_autograd_keyset).add(DispatchKey::AutogradOther);
}

bool MayBeUsers(const at::Tensor& tensor) {
  return !tensor.grad_fn() || (tensor.is_view() && !tensor._base().grad_fn());
}

const char* CapturedNode::WhyDense(const at::Tensor& grad, size_t weight_edge) const {
  if (at::GradMode::is_enabled()) return "create_graph=True";
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (!chosen || !chosen->empty()) return "torch.autograd.grad() or backward(inputs=...)";
  if (!IsPlain(grad)) return "its layer's gradient is not an ordinary tensor";
  if (HasHooks(next_edge(weight_edge))) return "a hook on it wants its gradient";
  return nullptr;
}

CapturedNode::Todo CapturedNode::Decide(const at::Tensor& grad, size_t weight_edge,
                                        size_t bias_edge) {
  const bool weight_wanted = task_should_compute_output(weight_edge);
  const bool bias_wanted = bias_edge != kNoEdge && task_should_compute_output(bias_edge);
  CaptureMode mode = weight_.entry->mode;
  if (mode != CaptureMode::kOff) {
    if (const char* reason = WhyDense(grad, weight_edge)) {
      Decline(*weight_.entry, reason);
      mode = CaptureMode::kOff;
    }
  }
  Todo todo;
  todo.keep = weight_wanted && mode != CaptureMode::kOff;
  todo.keep_bias = todo.keep && bias_wanted && bias_ && bias_->mode != CaptureMode::kOff;
  if (todo.keep_bias && HasHooks(next_edge(bias_edge))) {
    Decline(*bias_, "a hook on it wants its gradient");
    todo.keep_bias = false;
  }
  todo.dense_weight = weight_wanted && mode != CaptureMode::kRows;
  todo.dense_bias = bias_wanted && !(todo.keep_bias && mode == CaptureMode::kRows);
  return todo;
}

EntryPtr BiasToCapture(const Use& weight, int64_t rows, const at::Tensor& bias) {
  if (!bias.defined() || !bias.requires_grad()) return nullptr;
  auto use = FindUse(bias);
  if (!use || use->entry->mode == CaptureMode::kOff) return nullptr;
  if (use->begin != weight.begin || use->whole != weight.whole || bias.size(0) != rows) {
    Decline(*use->entry, "it does not go with the rows of its weight");
    return nullptr;
  }
  if (!Pair(weight.entry, use->entry)) return nullptr;
  return std::move(use->entry);
}

}  // namespace dad_torch
