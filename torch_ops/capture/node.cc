#include "torch_ops/capture/node.h"

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

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

bool MayCapture(const at::Tensor& weight, std::initializer_list<const at::Tensor*> others,
                bool mixed) {
  if (CaptureIdle() || !at::GradMode::is_enabled() || !weight.requires_grad()) return false;
  if (!IsPlain(weight) || weight._fw_grad(0).defined()) return false;
  return std::all_of(others.begin(), others.end(), [&](const at::Tensor* other) {
    if (!other->defined()) return true;
    return IsPlain(*other) && (mixed || other->scalar_type() == weight.scalar_type()) &&
           other->device() == weight.device() && !other->_fw_grad(0).defined();
  });
}

std::optional<Use> UseToCapture(const at::Tensor& weight,
                                std::initializer_list<const at::Tensor*> others, bool mixed) {
  if (!MayCapture(weight, others, mixed)) return std::nullopt;
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

namespace {

bool InBackward() { return torch::autograd::get_current_graph_task_id() >= 0; }

}  // namespace

RowLayout LayoutOf(const at::Tensor& input, int64_t row_dims) {
  if (row_dims == 0) return SamplesInFront(1, /*begins=*/false);
  const auto dims = input.sizes().slice(0, static_cast<size_t>(row_dims));
  const int64_t rows = c10::multiply_integers(dims);
  LeadingDimension front{dims[0], false};
  if (row_dims > 1) front.was_behind = 0 < input.stride(0) && input.stride(0) < input.stride(1);
  if (row_dims == 1 && input.dim() == 2) front = LeadingBeforeReshape(input);
  const int64_t leading = front.size;
  const Batch batch = CurrentBatch(leading, InBackward());
  RowLayout layout;
  layout.batch = batch.number;
  layout.samples = leading;
  if (rows == 0) return layout;
  layout.inner = rows / leading;
  if (batch.samples <= 0) return layout;
  const int64_t second = row_dims > 1 ? dims[1] : layout.inner;
  if (second == batch.samples && (leading != second || front.was_behind)) {
    layout.outer = leading;
    layout.samples = second;
    layout.inner = rows / (leading * second);
  } else if (leading == rows && leading > batch.samples && leading % batch.samples == 0) {
    layout.samples = batch.samples;
    layout.inner = rows / batch.samples;
    layout.known = false;
  }
  return layout;
}

RowLayout SamplesInFront(int64_t samples, bool begins) {
  RowLayout layout;
  layout.samples = samples;
  layout.batch = CurrentBatch(begins ? samples : -1, InBackward()).number;
  return layout;
}

at::Tensor BySample(const at::Tensor& matrix, const RowLayout& layout) {
  if (layout.outer == 1) return matrix;
  return matrix.reshape({layout.outer, layout.samples, layout.inner, matrix.size(1)})
      .transpose(0, 1)
      .reshape(matrix.sizes());
}

const char* CapturingNode::WhyDense(const at::Tensor& grad, size_t edge) const {
  if (at::GradMode::is_enabled()) return "create_graph=True";
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (!chosen || !chosen->empty()) return "torch.autograd.grad() or backward(inputs=...)";
  if (!IsPlain(grad)) return "its layer's gradient is not an ordinary tensor";
  if (HasHooks(next_edge(edge))) return "a hook on it wants its gradient";
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
  const bool rows_only = mode == CaptureMode::kRows || mode == CaptureMode::kSamples;
  todo.keep = weight_wanted && mode != CaptureMode::kOff;
  todo.by_sample = mode == CaptureMode::kSamples;
  todo.keep_bias = todo.keep && bias_wanted && bias_ && bias_->mode != CaptureMode::kOff;
  if (todo.keep_bias && HasHooks(next_edge(bias_edge))) {
    Decline(*bias_, "a hook on it wants its gradient");
    todo.keep_bias = false;
  }
  todo.dense_weight = weight_wanted && !rows_only;
  todo.dense_bias = bias_wanted && !(todo.keep_bias && rows_only);
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
