// aten::convolution with a tracked weight, in one, two or three dimensions. A row is an output
// position: A has the patch of the input that it sees (im2col), one matrix for each group.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/convolution_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch_ops/capture/node.h"
#include "torch_ops/capture/rows.h"

namespace dad_torch {

namespace {

namespace ag = torch::autograd;
using Ints = std::vector<int64_t>;

// Values for each dimension, also where one was given for all; nothing if one is symbolic.
std::optional<Ints> PerDimension(c10::SymIntArrayRef values, size_t dims) {
  Ints result;
  for (size_t i = 0; i < dims; ++i) {
    if (values.size() != 1 && values.size() != dims) return std::nullopt;
    const auto value = values[values.size() == 1 ? 0 : i].maybe_as_int();
    if (!value) return std::nullopt;
    result.push_back(*value);
  }
  return result;
}

class CapturedConvolution final : public CapturedNode {
 public:
  enum : size_t { kInput, kWeight, kBias };

  CapturedConvolution(Use weight, EntryPtr bias, const at::Tensor& x, const at::Tensor& w,
                      const at::Tensor& b, Geometry geometry)
      : CapturedNode(std::move(weight), std::move(bias)),
        x_(x, /*is_output=*/false),
        w_(w, /*is_output=*/false),
        kernel_(w.sizes().slice(2).vec()),
        out_(w.size(0)),
        geometry_(std::move(geometry)) {
    layout_ = SamplesInFront(x.size(0));
    if (b.defined()) bias_sizes_ = b.sizes().vec();
  }

  std::string name() const override { return "DadConvolutionBackward"; }

  ag::variable_list apply(ag::variable_list&& grads) override;
  void release_variables() override {
    std::lock_guard lock(mutex_);
    x_.reset_data();
    w_.reset_data();
  }
  void release_resources() override {
    x_ = {};
    w_ = {};
    Node::release_resources();
  }

 private:
  void KeepRows(const at::Tensor& x, const at::Tensor& grad, bool with_bias);

  ag::SavedVariable x_;
  ag::SavedVariable w_;
  const Ints kernel_;
  const int64_t out_;
  std::optional<Ints> bias_sizes_;
  const Geometry geometry_;
};

void CapturedConvolution::KeepRows(const at::Tensor& x, const at::Tensor& grad, bool with_bias) {
  const int64_t groups = geometry_.groups;
  // A reshape of a 1x1 kernel may need no copy, and x may be the user's.
  at::Tensor a = Patches(x.detach(), kernel_, grad.sizes().slice(2), geometry_);
  a = ForSegment(a, a.is_alias_of(x));
  const at::Tensor d = ForSegment(Deltas(grad, groups), /*others_memory=*/false);
  for (int64_t group = 0; group < groups; ++group) {
    Segment segment;
    segment.a = a[group];
    segment.d = d[group];
    segment.out_begin = weight_.begin + group * (out_ / groups);
    segment.has_bias = with_bias;
    Keep(std::move(segment));
  }
}

ag::variable_list CapturedConvolution::apply(ag::variable_list&& grads) {
  std::lock_guard lock(mutex_);
  ag::variable_list result(3);
  const at::Tensor& grad = grads[0];
  if (!grad.defined()) return result;
  const Todo todo = Decide(grad, kWeight, kBias);
  const at::Tensor x = x_.unpack();
  if (todo.keep) KeepRows(x, grad, todo.keep_bias);
  const std::array<bool, 3> wanted = {task_should_compute_output(kInput), todo.dense_weight,
                                      todo.dense_bias};
  if (wanted[0] || wanted[1] || wanted[2]) {
    const Ints no_output_padding(kernel_.size(), 0);
    at::OptionalIntArrayRef bias_sizes;
    if (bias_sizes_) bias_sizes = *bias_sizes_;
    std::tie(result[kInput], result[kWeight], result[kBias]) = at::convolution_backward(
        grad, x, w_.unpack(), bias_sizes, geometry_.stride, geometry_.padding, geometry_.dilation,
        /*transposed=*/false, no_output_padding, geometry_.groups, wanted);
  }
  return result;
}

at::Tensor Convolution(c10::DispatchKeySet keys, const at::Tensor& x, const at::Tensor& w,
                       const std::optional<at::Tensor>& optional_bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::convolution", "")
                             .typed<at::_ops::convolution::schema>();
  const auto call = [&](c10::DispatchKeySet at_keys) {
    return op.redispatch(at_keys, x, w, optional_bias, stride, padding, dilation, transposed,
                         output_padding, groups);
  };
  if (CaptureIdle()) return call(TorchAutograd(keys));
  const at::Tensor bias = optional_bias.value_or(at::Tensor());
  std::optional<Use> use = UseToCapture(w, {&x, &bias});
  if (use && transposed) {
    Decline(*use->entry, "a transposed convolution");
    use.reset();
  }
  const size_t dims = w.dim() > 2 ? static_cast<size_t>(w.dim()) - 2 : 0;
  const auto strides = PerDimension(stride, dims);
  const auto paddings = PerDimension(padding, dims);
  const auto dilations = PerDimension(dilation, dims);
  const auto number = groups.maybe_as_int();
  if (!use || dims == 0 || x.dim() != w.dim() || !strides || !paddings || !dilations || !number) {
    return call(TorchAutograd(keys));
  }
  at::Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    y = call(keys & c10::after_autograd_keyset);
  }
  EntryPtr folded = BiasToCapture(*use, w.size(0), bias);
  auto node =
      c10::make_intrusive<CapturedConvolution>(std::move(*use), std::move(folded), x, w, bias,
                                               Geometry{*strides, *paddings, *dilations, *number});
  node->set_next_edges(ag::collect_next_edges(x, w, bias));
  ag::set_history(y, node);
  return y;
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) { m.impl("convolution", &Convolution); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("convolution", &Convolution); }

}  // namespace

}  // namespace dad_torch
