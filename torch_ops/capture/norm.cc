// Norm layers whose weight or bias is tracked in the mode kSamples: y = x̂ ∘ w + b. Of a sample, the
// weight's gradient is the sum over its positions of dy ∘ x̂, and the bias's that of dy. (A
// batch_norm makes x̂ from all samples; what is meant is the part of the sum that is at its
// positions.) They go to the parameters as segments of their own.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/group_norm_native.h>
#include <ATen/ops/layer_norm_native.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/native_group_norm_backward.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm_ops.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch_ops/capture/node.h"
#include "torch_ops/capture/rows.h"

namespace dad_torch {

namespace {

namespace ag = torch::autograd;
using OptionalTensor = std::optional<at::Tensor>;

// What an op of a norm is given. The weight and the bias may be undefined.
struct Operands {
  at::Tensor x;
  at::Tensor w;
  at::Tensor b;
};

// Where the segments of a norm's parameter go: nowhere without an entry.
struct Destination {
  EntryPtr entry;
  int64_t times = 1;  // the op has the parameter so often, once for each sample
};

Destination Find(const at::Tensor& param, const at::Tensor& x) {
  Destination to;
  if (!param.defined() || !MayCapture(param, {&x}, /*mixed=*/true)) return to;
  // Not earlier: in a graph that is being traced a size may be a symbol.
  if (x.numel() == 0) return to;
  if (auto use = FindUse(param); use && use->whole) {
    to.entry = std::move(use->entry);
  } else if (auto repeated = FindRepeatedUse(param)) {
    to = {std::move(repeated->entry), repeated->times};
  }
  if (to.entry && (to.entry->mode != CaptureMode::kSamples || !StandAlone(*to.entry))) {
    to.entry.reset();
  }
  return to;
}

struct Destinations {
  Destination weight;
  Destination bias;
  bool any() const { return weight.entry || bias.entry; }
};

Destinations FindBoth(const Operands& op) { return {Find(op.w, op.x), Find(op.b, op.x)}; }

// The type in which sums over positions are made.
at::ScalarType SumType(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The sums of N × n values over the rows of each sample: samples × n.
at::Tensor SumBySample(const at::Tensor& values, const RowLayout& layout) {
  if (!layout.known || (layout.outer == 1 && layout.inner == 1)) return values;
  return values.reshape({layout.outer, layout.samples, layout.inner, values.size(1)}).sum({0, 2});
}

class CapturedNorm : public CapturingNode {
 public:
  enum : size_t { kInput, kWeight, kBias };
  using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

  CapturedNorm(const Operands& op, Destinations to)
      : x_(op.x, /*is_output=*/false),
        w_(op.w, /*is_output=*/false),
        b_(op.b, /*is_output=*/false),
        to_(std::move(to)) {}

  ag::variable_list apply(ag::variable_list&& grads) override;
  void release_variables() override {
    std::lock_guard lock(mutex_);
    x_.reset_data();
    w_.reset_data();
    b_.reset_data();
    ReleaseStatistics();
  }
  void release_resources() override {
    x_ = {};
    w_ = {};
    b_ = {};
    ReleaseStatistics();
    Node::release_resources();
  }

 protected:
  // torch's own op, which autograd can follow.
  virtual at::Tensor Again(const Operands& op) const = 0;
  // torch's gradients; undefined where not wanted.
  virtual Gradients Dense(const at::Tensor& grad, const Operands& op,
                          std::array<bool, 3> wanted) const = 0;
  // samples × n
  virtual at::Tensor WeightRows(const at::Tensor& grad, const at::Tensor& x) const = 0;
  virtual at::Tensor BiasRows(const at::Tensor& grad) const = 0;
  virtual void ReleaseStatistics() = 0;

  RowLayout layout_;

 private:
  // Whether to keep the rows of the parameter at this edge.
  bool ToKeep(const Destination& to, const at::Tensor& grad, size_t edge) const;
  void KeepRows(const Destination& to, const at::Tensor& rows);
  ag::variable_list WithGraph(const at::Tensor& grad, const Operands& op,
                              std::array<bool, 3> wanted) const;

  ag::SavedVariable x_;
  ag::SavedVariable w_;
  ag::SavedVariable b_;
  const Destinations to_;
};

bool CapturedNorm::ToKeep(const Destination& to, const at::Tensor& grad, size_t edge) const {
  if (!to.entry || to.entry->mode != CaptureMode::kSamples) return false;
  if (!task_should_compute_output(edge)) return false;
  const char* reason = WhyDense(grad, edge);
  if (reason) Decline(*to.entry, reason);
  return !reason;
}

void CapturedNorm::KeepRows(const Destination& to, const at::Tensor& rows) {
  auto param = to.entry->param.lock();
  if (!param) return;
  const at::IntArrayRef shape = param->sizes();
  Segment segment;
  segment.batch = layout_.batch;
  const at::Tensor d = ForSegment(rows.reshape({-1, param->numel()}), /*others_memory=*/false);
  segment.samples = to.times > 1 ? to.times : layout_.samples;
  segment.even = layout_.known;
  if (shape.size() == 1) {
    segment.a = at::ones({d.size(0), 1}, d.options());
    segment.d = d;
  } else {
    segment.kind = SegmentKind::kIndexed;
    segment.index = at::arange(shape[0], d.options().dtype(at::kLong)).repeat({d.size(0)});
    segment.x = d.view({d.size(0) * shape[0], -1});
  }
  KeepFor(*to.entry, std::move(segment));
}

ag::variable_list CapturedNorm::WithGraph(const at::Tensor& grad, const Operands& op,
                                          std::array<bool, 3> wanted) const {
  const std::array<at::Tensor, 3> all = {op.x, op.w, op.b};
  ag::variable_list inputs;
  for (size_t i = 0; i < all.size(); ++i) {
    if (wanted[i]) inputs.push_back(all[i]);
  }
  ag::variable_list result(3);
  if (inputs.empty()) return result;
  auto found = ag::grad({Again(op)}, inputs, {grad}, /*retain_graph=*/true, /*create_graph=*/true,
                        /*allow_unused=*/true);
  size_t next = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (wanted[i]) result[i] = std::move(found[next++]);
  }
  return result;
}

ag::variable_list CapturedNorm::apply(ag::variable_list&& grads) {
  std::lock_guard lock(mutex_);
  ag::variable_list result(3);
  const at::Tensor& grad = grads[0];
  if (!grad.defined()) return result;
  const Operands op = {x_.unpack(), w_.unpack(), b_.unpack()};
  const bool keep_weight = ToKeep(to_.weight, grad, kWeight);
  const bool keep_bias = ToKeep(to_.bias, grad, kBias);
  const std::array<bool, 3> wanted = {task_should_compute_output(kInput),
                                      !keep_weight && task_should_compute_output(kWeight),
                                      !keep_bias && task_should_compute_output(kBias)};
  if (at::GradMode::is_enabled()) return WithGraph(grad, op, wanted);
  if (keep_weight) KeepRows(to_.weight, WeightRows(grad, op.x));
  if (keep_bias) KeepRows(to_.bias, BiasRows(grad));
  if (wanted[0] || wanted[1] || wanted[2]) {
    std::tie(result[kInput], result[kWeight], result[kBias]) = Dense(grad, op, wanted);
  }
  return result;
}

at::Tensor Attach(at::Tensor y, c10::intrusive_ptr<CapturedNorm> node, const Operands& op) {
  node->set_next_edges(ag::collect_next_edges(op.x, op.w, op.b));
  ag::set_history(y, node);
  return y;
}

std::vector<c10::SymInt> Symbolic(at::IntArrayRef values) { return {values.begin(), values.end()}; }

// layer_norm and rms_norm: over the last dimensions, so a row is what is normalised together.

class CapturedLastDims : public CapturedNorm {
 public:
  CapturedLastDims(const Operands& op, Destinations to, at::IntArrayRef shape)
      : CapturedNorm(op, std::move(to)), shape_(shape.vec()) {
    layout_ = LayoutOf(op.x, op.x.dim() - shape.size());
  }

 protected:
  at::Tensor BiasRows(const at::Tensor& grad) const override {
    const at::Tensor d = grad.reshape({-1, c10::multiply_integers(shape_)});
    return SumBySample(d.to(SumType(grad)), layout_);
  }

  // Of dy ∘ x̂, which has the shape of x.
  at::Tensor SumOf(const at::Tensor& products) const {
    return SumBySample(products.reshape({-1, c10::multiply_integers(shape_)}), layout_);
  }

  const std::vector<int64_t> shape_;
};

class CapturedLayerNorm final : public CapturedLastDims {
 public:
  CapturedLayerNorm(const Operands& op, Destinations to, at::IntArrayRef shape, at::Tensor mean,
                    at::Tensor rstd, double eps)
      : CapturedLastDims(op, std::move(to), shape),
        mean_(std::move(mean)),
        rstd_(std::move(rstd)),
        eps_(eps) {}

  std::string name() const override { return "DadLayerNormBackward"; }

 protected:
  at::Tensor Again(const Operands& op) const override {
    return at::native::layer_norm_symint(op.x, Symbolic(shape_), op.w, op.b, eps_);
  }
  Gradients Dense(const at::Tensor& grad, const Operands& op,
                  std::array<bool, 3> wanted) const override {
    return at::native_layer_norm_backward(grad, op.x, shape_, mean_, rstd_, op.w, op.b, wanted);
  }
  at::Tensor WeightRows(const at::Tensor& grad, const at::Tensor& x) const override {
    const at::ScalarType type = SumType(x);
    return SumOf(x.detach().to(type).sub(mean_.to(type)).mul_(rstd_.to(type)).mul_(grad));
  }
  void ReleaseStatistics() override {
    mean_.reset();
    rstd_.reset();
  }

 private:
  at::Tensor mean_;
  at::Tensor rstd_;
  const double eps_;
};

// torch's own, of which no function is exported.
at::Tensor TorchsRmsNorm(c10::DispatchKeySet keys, const at::Tensor& x, c10::SymIntArrayRef shape,
                         const OptionalTensor& w, std::optional<double> eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::rms_norm", "")
                             .typed<at::_ops::rms_norm::schema>();
  return op.redispatch(keys, x, shape, w, eps);
}

class CapturedRmsNorm final : public CapturedLastDims {
 public:
  CapturedRmsNorm(const Operands& op, Destinations to, at::IntArrayRef shape,
                  std::optional<double> eps, c10::DispatchKeySet torchs)
      : CapturedLastDims(op, std::move(to), shape), eps_(eps), torchs_(torchs) {}

  std::string name() const override { return "DadRmsNormBackward"; }

 protected:
  at::Tensor Again(const Operands& op) const override {
    return TorchsRmsNorm(torchs_, op.x, Symbolic(shape_), op.w, eps_);
  }
  Gradients Dense(const at::Tensor& grad, const Operands& op,
                  std::array<bool, 3> wanted) const override {
    const auto [x_hat, rstd] = Normalised(op.x);
    const at::Tensor dy = grad.to(x_hat.scalar_type());
    Gradients result;
    if (wanted[kInput]) {
      // x̂ = x / rms(x), so dx = (g - x̂ mean(x̂ ∘ g)) / rms(x), with g = dy ∘ w.
      const at::Tensor g = op.w.defined() ? dy.mul(op.w) : dy;
      std::vector<int64_t> dims;
      for (size_t i = 0; i < shape_.size(); ++i) dims.push_back(-1 - static_cast<int64_t>(i));
      const at::Tensor mean = x_hat.mul(g).mean(dims, /*keepdim=*/true);
      std::get<0>(result) = g.sub(x_hat.mul(mean)).mul_(rstd).to(op.x.scalar_type());
    }
    if (wanted[kWeight]) {
      std::get<1>(result) = x_hat.mul(dy)
                                .reshape({-1, op.w.numel()})
                                .sum(0)
                                .view(op.w.sizes())
                                .to(op.w.scalar_type());
    }
    return result;
  }
  at::Tensor WeightRows(const at::Tensor& grad, const at::Tensor& x) const override {
    return SumOf(std::get<0>(Normalised(x)).mul_(grad));
  }
  void ReleaseStatistics() override {}

 private:
  // x̂ and 1 / rms(x)
  std::pair<at::Tensor, at::Tensor> Normalised(const at::Tensor& x) const {
    const at::ScalarType type = SumType(x);
    // What eps is by default depends on the type of x.
    const at::Tensor rstd =
        std::get<1>(at::_fused_rms_norm(x.detach(), shape_, std::nullopt, eps_)).to(type);
    return {x.detach().to(type).mul(rstd), rstd};
  }
  const std::optional<double> eps_;
  const c10::DispatchKeySet torchs_;
};

// group_norm and batch_norm: the first dimension of x is the samples, the second the channels.

at::Tensor AsChannels(const at::Tensor& tensor) {
  return tensor.reshape({tensor.size(0), tensor.size(1), -1});
}

class CapturedChannels : public CapturedNorm {
 public:
  CapturedChannels(const Operands& op, Destinations to) : CapturedNorm(op, std::move(to)) {
    layout_ = op.x.dim() == 2 ? LayoutOf(op.x, 1) : SamplesInFront(op.x.size(0));
  }

 protected:
  at::Tensor BiasRows(const at::Tensor& grad) const override {
    return SumBySample(AsChannels(grad).sum(2, /*keepdim=*/false, SumType(grad)), layout_);
  }
};

class CapturedGroupNorm final : public CapturedChannels {
 public:
  CapturedGroupNorm(const Operands& op, Destinations to, int64_t groups, at::Tensor mean,
                    at::Tensor rstd, double eps)
      : CapturedChannels(op, std::move(to)),
        groups_(groups),
        mean_(std::move(mean)),
        rstd_(std::move(rstd)),
        eps_(eps) {}

  std::string name() const override { return "DadGroupNormBackward"; }

 protected:
  at::Tensor Again(const Operands& op) const override {
    return at::native::group_norm(op.x, groups_, op.w, op.b, eps_);
  }
  Gradients Dense(const at::Tensor& grad, const Operands& op,
                  std::array<bool, 3> wanted) const override {
    const auto format = op.x.suggest_memory_format();
    const int64_t samples = op.x.size(0);
    const int64_t channels = op.x.size(1);
    return at::native_group_norm_backward(grad.contiguous(format), op.x.contiguous(format), mean_,
                                          rstd_, op.w, samples, channels,
                                          op.x.numel() / (samples * channels), groups_, wanted);
  }
  at::Tensor WeightRows(const at::Tensor& grad, const at::Tensor& x) const override {
    const at::ScalarType type = SumType(x);
    const int64_t samples = x.size(0);
    const int64_t channels = x.size(1);
    const at::Tensor sums = x.detach()
                                .to(type)
                                .reshape({samples, groups_, -1})
                                .sub(mean_.to(type).unsqueeze(2))
                                .view({samples, channels, -1})
                                .mul_(AsChannels(grad))
                                .sum(2);
    const at::Tensor d =
        sums.view({samples, groups_, -1}).mul(rstd_.to(type).unsqueeze(2)).view({samples, -1});
    return SumBySample(d, layout_);
  }
  void ReleaseStatistics() override {
    mean_.reset();
    rstd_.reset();
  }

 private:
  const int64_t groups_;
  at::Tensor mean_;  // samples × groups
  at::Tensor rstd_;
  const double eps_;
};

// The mean and the variance that a batch_norm uses instead of the batch's; undefined in training.
struct RunningStatistics {
  at::Tensor mean;
  at::Tensor var;
};

class CapturedBatchNorm final : public CapturedChannels {
 public:
  CapturedBatchNorm(const Operands& op, Destinations to, RunningStatistics running, at::Tensor mean,
                    at::Tensor rstd, double eps)
      : CapturedChannels(op, std::move(to)),
        running_(std::move(running)),
        mean_(std::move(mean)),
        rstd_(std::move(rstd)),
        eps_(eps) {}

  std::string name() const override { return "DadBatchNormBackward"; }

 protected:
  bool training() const { return !running_.mean.defined(); }

  at::Tensor Again(const Operands& op) const override {
    return at::native::batch_norm(op.x, op.w, op.b, running_.mean, running_.var, training(),
                                  /*momentum=*/0.0, eps_, /*cudnn_enabled=*/false);
  }
  Gradients Dense(const at::Tensor& grad, const Operands& op,
                  std::array<bool, 3> wanted) const override {
    return at::native_batch_norm_backward(grad, op.x, op.w, running_.mean, running_.var, mean_,
                                          rstd_, training(), eps_, wanted);
  }
  at::Tensor WeightRows(const at::Tensor& grad, const at::Tensor& x) const override {
    const at::ScalarType type = SumType(x);
    const at::Tensor mean = training() ? mean_ : running_.mean;
    const at::Tensor rstd = training() ? rstd_ : running_.var.to(type).add(eps_).rsqrt();
    const at::Tensor d = AsChannels(x.detach())
                             .to(type)
                             .sub(mean.to(type).unsqueeze(1))
                             .mul_(AsChannels(grad))
                             .sum(2)
                             .mul_(rstd.to(type));
    return SumBySample(d, layout_);
  }
  void ReleaseStatistics() override {
    mean_.reset();
    rstd_.reset();
    running_ = {};
  }

 private:
  RunningStatistics running_;
  at::Tensor mean_;
  at::Tensor rstd_;
  const double eps_;
};

// The ops.

bool HasShape(const at::Tensor& tensor, at::IntArrayRef shape) {
  return !tensor.defined() || tensor.sizes() == shape;
}

// The normalised shape, if the op is an ordinary one.
std::optional<std::vector<int64_t>> LastDims(const Operands& op, c10::SymIntArrayRef shape) {
  const auto sizes = c10::asIntArrayRefSlowOpt(shape);
  if (!sizes || sizes->empty() || static_cast<size_t>(op.x.dim()) < sizes->size()) return {};
  const at::IntArrayRef last = op.x.sizes().slice(op.x.dim() - sizes->size());
  if (last != *sizes || !HasShape(op.w, *sizes) || !HasShape(op.b, *sizes)) return {};
  return sizes->vec();
}

at::Tensor LayerNorm(const at::Tensor& x, c10::SymIntArrayRef shape, const OptionalTensor& w,
                     const OptionalTensor& b, double eps, bool cudnn_enable) {
  const auto torchs = [&] {
    return at::native::layer_norm_symint(x, shape, w, b, eps, cudnn_enable);
  };
  if (CaptureIdle()) return torchs();
  const Operands op = {x, w.value_or(at::Tensor()), b.value_or(at::Tensor())};
  Destinations to = FindBoth(op);
  const auto sizes = to.any() ? LastDims(op, shape) : std::nullopt;
  if (!sizes) return torchs();
  at::Tensor y;
  at::Tensor mean;
  at::Tensor rstd;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(y, mean, rstd) = at::native_layer_norm(x, *sizes, w, b, eps);
  }
  auto node = c10::make_intrusive<CapturedLayerNorm>(op, std::move(to), *sizes, std::move(mean),
                                                     std::move(rstd), eps);
  return Attach(std::move(y), std::move(node), op);
}

at::Tensor RmsNorm(c10::DispatchKeySet keys, const at::Tensor& x, c10::SymIntArrayRef shape,
                   const OptionalTensor& w, std::optional<double> eps) {
  const auto call = [&](c10::DispatchKeySet at_keys) {
    return TorchsRmsNorm(at_keys, x, shape, w, eps);
  };
  if (CaptureIdle()) return call(TorchAutograd(keys));
  const Operands op = {x, w.value_or(at::Tensor()), {}};
  Destinations to = FindBoth(op);
  const auto sizes = to.any() ? LastDims(op, shape) : std::nullopt;
  if (!sizes) return call(TorchAutograd(keys));
  at::Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    y = call(keys & c10::after_autograd_keyset);
  }
  auto node =
      c10::make_intrusive<CapturedRmsNorm>(op, std::move(to), *sizes, eps, TorchAutograd(keys));
  return Attach(std::move(y), std::move(node), op);
}

bool HasChannels(const Operands& op) {
  return op.x.dim() >= 2 && HasShape(op.w, {op.x.size(1)}) && HasShape(op.b, {op.x.size(1)});
}

at::Tensor GroupNorm(const at::Tensor& x, int64_t groups, const OptionalTensor& w,
                     const OptionalTensor& b, double eps, bool cudnn_enabled) {
  const auto torchs = [&] { return at::native::group_norm(x, groups, w, b, eps, cudnn_enabled); };
  if (CaptureIdle()) return torchs();
  const Operands op = {x, w.value_or(at::Tensor()), b.value_or(at::Tensor())};
  Destinations to = FindBoth(op);
  if (!to.any() || !HasChannels(op) || groups <= 0 || x.size(1) % groups != 0) return torchs();
  at::Tensor y;
  at::Tensor mean;
  at::Tensor rstd;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    const int64_t samples = x.size(0);
    const int64_t channels = x.size(1);
    std::tie(y, mean, rstd) =
        at::native_group_norm(x.contiguous(x.suggest_memory_format()), w, b, samples, channels,
                              x.numel() / (samples * channels), groups, eps);
  }
  auto node = c10::make_intrusive<CapturedGroupNorm>(op, std::move(to), groups, std::move(mean),
                                                     std::move(rstd), eps);
  return Attach(std::move(y), std::move(node), op);
}

at::Tensor BatchNorm(const at::Tensor& x, const OptionalTensor& w, const OptionalTensor& b,
                     const OptionalTensor& running_mean, const OptionalTensor& running_var,
                     bool training, double momentum, double eps, bool cudnn_enabled) {
  const auto torchs = [&] {
    return at::native::batch_norm(x, w, b, running_mean, running_var, training, momentum, eps,
                                  cudnn_enabled);
  };
  if (CaptureIdle()) return torchs();
  const Operands op = {x, w.value_or(at::Tensor()), b.value_or(at::Tensor())};
  Destinations to = FindBoth(op);
  if (!to.any() || !HasChannels(op)) return torchs();
  const RunningStatistics given = {running_mean.value_or(at::Tensor()),
                                   running_var.value_or(at::Tensor())};
  const at::IntArrayRef channels = op.x.sizes().slice(1, 1);
  // Repeated parameters have one sample in every channel.
  const bool repeated = to.weight.times > 1 || to.bias.times > 1;
  if (!HasShape(given.mean, channels) || !HasShape(given.var, channels) ||
      (!training && (!given.mean.defined() || !given.var.defined())) ||
      (repeated && x.size(0) != 1)) {
    return torchs();
  }
  at::Tensor y;
  at::Tensor mean;
  at::Tensor rstd;
  RunningStatistics used;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(y, mean, rstd) =
        at::native_batch_norm(x, w, b, running_mean, running_var, training, momentum, eps);
    if (!training) used = {given.mean.detach().clone(), given.var.detach().clone()};
  }
  auto node = c10::make_intrusive<CapturedBatchNorm>(op, std::move(to), std::move(used),
                                                     std::move(mean), std::move(rstd), eps);
  return Attach(std::move(y), std::move(node), op);
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) {
  m.impl("layer_norm", &LayerNorm);
  m.impl("rms_norm", &RmsNorm);
  m.impl("group_norm", &GroupNorm);
  m.impl("batch_norm", &BatchNorm);
}
// A GPU's batch_norm is cuDNN's, and stays so.
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  m.impl("layer_norm", &LayerNorm);
  m.impl("rms_norm", &RmsNorm);
  m.impl("group_norm", &GroupNorm);
}

}  // namespace

}  // namespace dad_torch
