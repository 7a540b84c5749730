// Capture where a graph is compiled. A tracer sees no parameters, only tensors that stand for them,
// so the ops here are told which parameter it is (python/dad/torch/capture.py puts them into the
// graph). Forward they are what they replace. Their gradients consist of the ordinary ops for the
// input and of an op that keeps a segment when the graph runs; what is not in the graph any more is
// the product that the segment stands for.
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "torch_ops/capture/node.h"
#include "torch_ops/capture/rows.h"

namespace dad_torch {

namespace {

namespace ag = torch::autograd;
using ag::AutogradContext;
using ag::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

template <typename Signature>
c10::TypedOperatorHandle<Signature> Op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Rows of a tensor with any leading dimensions.
at::Tensor AsRows(const at::Tensor& tensor) {
  return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.flatten(0, -2);
}

// Whether the leading dimension of an input was behind the next one before: attention's, whose
// samples come second.
bool WasTransposed(const at::Tensor& input) {
  return input.dim() > 2 && 0 < input.sym_stride(0) && input.sym_stride(0) < input.sym_stride(1);
}

c10::SymInt Samples(const at::Tensor& input) {
  if (input.dim() < 2) return 1;
  return input.sym_size(WasTransposed(input) ? 1 : 0);
}

class TracedLinear : public ag::Function<TracedLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w,
                            const OptionalTensor& b, int64_t id, int64_t bias_id,
                            int64_t out_begin) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x, w});
    ctx->saved_data["id"] = id;
    ctx->saved_data["bias_id"] = bias_id;
    ctx->saved_data["dense_bias"] = bias_id < 0 && b && b->requires_grad();
    ctx->saved_data["out_begin"] = out_begin;
    return at::linear(x, w, b);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto keep = Op<void(const at::Tensor&, const at::Tensor&, int64_t, int64_t,
                                     int64_t, c10::SymInt, bool)>("dad::keep_rows");
    const auto saved = ctx->get_saved_variables();
    const int64_t bias_id = ctx->saved_data["bias_id"].toInt();
    const at::Tensor d = AsRows(grads[0]);
    keep.call(AsRows(saved[0]), d, ctx->saved_data["id"].toInt(), bias_id,
              ctx->saved_data["out_begin"].toInt(), Samples(saved[0]), !WasTransposed(saved[0]));
    variable_list result(6);
    if (ctx->needs_input_grad(0)) result[0] = at::matmul(grads[0], saved[1]);
    if (ctx->saved_data["dense_bias"].toBool()) result[2] = d.sum(0);
    return result;
  }
};

class TracedConvolution : public ag::Function<TracedConvolution> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w,
                            const OptionalTensor& b, at::IntArrayRef stride,
                            at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                            int64_t id, int64_t bias_id) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x, w});
    ctx->saved_data["stride"] = stride;
    ctx->saved_data["padding"] = padding;
    ctx->saved_data["dilation"] = dilation;
    ctx->saved_data["groups"] = groups;
    ctx->saved_data["id"] = id;
    ctx->saved_data["bias_id"] = bias_id;
    ctx->saved_data["dense_bias"] = bias_id < 0 && b && b->requires_grad();
    const std::vector<int64_t> no_output_padding(stride.size(), 0);
    return at::convolution(x, w, b, stride, padding, dilation, /*transposed=*/false,
                           no_output_padding, groups);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto keep =
        Op<void(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef,
                at::IntArrayRef, at::IntArrayRef, int64_t, int64_t, int64_t)>("dad::keep_patches");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& w = saved[1];
    const auto stride = ctx->saved_data["stride"].toIntVector();
    const auto padding = ctx->saved_data["padding"].toIntVector();
    const auto dilation = ctx->saved_data["dilation"].toIntVector();
    const int64_t groups = ctx->saved_data["groups"].toInt();
    const int64_t bias_id = ctx->saved_data["bias_id"].toInt();
    keep.call(saved[0], grads[0], w.sizes().slice(2), stride, padding, dilation, groups,
              ctx->saved_data["id"].toInt(), bias_id);
    variable_list result(9);
    if (ctx->needs_input_grad(0)) {
      const std::vector<int64_t> no_output_padding(stride.size(), 0);
      result[0] = std::get<0>(at::convolution_backward(
          grads[0], saved[0], w, at::OptionalIntArrayRef(), stride, padding, dilation,
          /*transposed=*/false, no_output_padding, groups, {true, false, false}));
    }
    if (ctx->saved_data["dense_bias"].toBool())
      result[2] = grads[0].transpose(0, 1).flatten(1).sum(1);
    return result;
  }
};

class TracedEmbedding : public ag::Function<TracedEmbedding> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& w, const at::Tensor& indices,
                            int64_t padding_idx, int64_t id) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({indices});
    ctx->saved_data["padding_idx"] = padding_idx;
    ctx->saved_data["id"] = id;
    return at::embedding(w, indices, padding_idx);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto keep =
        Op<void(const at::Tensor&, const at::Tensor&, int64_t, int64_t)>("dad::keep_indexed");
    keep.call(ctx->get_saved_variables()[0], grads[0], ctx->saved_data["padding_idx"].toInt(),
              ctx->saved_data["id"].toInt());
    return variable_list(4);
  }
};

at::Tensor Linear(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& b, int64_t id,
                  int64_t bias_id, int64_t out_begin) {
  return TracedLinear::apply(x, w, b, id, bias_id, out_begin);
}

at::Tensor Convolution(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& b,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                       int64_t groups, int64_t id, int64_t bias_id) {
  return TracedConvolution::apply(x, w, b, stride, padding, dilation, groups, id, bias_id);
}

at::Tensor Embedding(const at::Tensor& w, const at::Tensor& indices, int64_t padding_idx,
                     int64_t id) {
  return TracedEmbedding::apply(w, indices, padding_idx, id);
}

// As torch does for the ops that these stand for.
template <c10::DeviceType device, auto* function>
constexpr auto kAutocast =
    &at::autocast::WrapFunction<at::autocast::CastPolicy::lower_precision_fp, device,
                                std::remove_pointer_t<decltype(function)>,
                                std::remove_pointer_t<decltype(function)>, function>::type::call;

// When the graph runs.

// A number for Keep: backward runs from the last op to the first.
uint64_t OpNumber() { return std::numeric_limits<uint64_t>::max() - 1 - NextOpNumber(); }

// A graph does not know what went forward with it; what goes backward with it will do.
uint64_t ThisPass() {
  constexpr uint64_t kNotEager = uint64_t{1} << 63;
  return kNotEager | static_cast<uint64_t>(ag::get_current_graph_task_id());
}

at::Tensor Alive(const Entry& entry) {
  auto impl = entry.param.lock();
  return impl ? at::Tensor(std::move(impl)) : at::Tensor();
}

// Whether this backward pass is to give the parameter a gradient. A graph cannot return one that it
// has no op for, so asking for it is an error.
bool Wanted(const at::Tensor& param) {
  if (!param.requires_grad()) return false;
  const auto leaf = ag::impl::try_get_grad_accumulator(param);
  TORCH_CHECK(!leaf || !HasHooks(ag::Edge(leaf, 0)),
              "a compiled graph keeps the rows of a layer's gradient (compression=); a hook on the "
              "parameter cannot be given the gradient");
  const auto* chosen = ag::get_current_graph_task_exec_info();
  if (!chosen || chosen->empty()) return true;
  const auto found = chosen->find(leaf.get());
  if (found == chosen->end()) return false;
  TORCH_CHECK(!found->second.captures_,
              "a compiled graph keeps the rows of a layer's gradient (compression=); "
              "torch.autograd.grad() cannot return it");
  return found->second.should_execute();
}

// Adds to the rows of param.grad that start at `begin`.
void AddToGrad(const at::Tensor& param, int64_t begin, const at::Tensor& grad) {
  at::NoGradGuard no_grad;
  at::Tensor& total = param.mutable_grad();
  if (!total.defined()) total = at::zeros_like(param);
  total.narrow(0, begin, grad.size(0)).add_(grad);
}

struct Destination {
  EntryPtr entry;
  at::Tensor param;
  EntryPtr bias_entry;
  at::Tensor bias;
  bool keep = false;
  bool keep_bias = false;
  bool dense = false;
  bool dense_bias = false;
};

// Modes may have changed since the graph was made; gradients that it does not compute are made
// here.
Destination Find(int64_t id, int64_t bias_id) {
  Destination to;
  to.entry = FindEntry(static_cast<int>(id));
  if (to.entry) to.param = Alive(*to.entry);
  if (bias_id >= 0) to.bias_entry = FindEntry(static_cast<int>(bias_id));
  if (to.bias_entry) to.bias = Alive(*to.bias_entry);
  const bool wanted = to.param.defined() && Wanted(to.param);
  const bool bias_wanted = to.bias.defined() && Wanted(to.bias);
  const CaptureMode mode = wanted ? to.entry->mode.load() : CaptureMode::kOff;
  to.keep = mode != CaptureMode::kOff;
  to.keep_bias = to.keep && bias_wanted && to.bias_entry->mode != CaptureMode::kOff &&
                 to.bias.size(0) == to.param.size(0) && Pair(to.entry, to.bias_entry);
  const bool rows_only = mode == CaptureMode::kRows || mode == CaptureMode::kSamples;
  to.dense = wanted && !rows_only;
  to.dense_bias = bias_wanted && !(to.keep_bias && rows_only);
  return to;
}

void KeepMatrices(const Destination& to, const at::Tensor& a, const at::Tensor& d,
                  int64_t out_begin, int64_t samples, bool even, uint64_t op_number) {
  Segment segment;
  segment.a = a;
  segment.d = d;
  segment.out_begin = out_begin;
  segment.has_bias = to.keep_bias;
  segment.samples = samples;
  segment.even = even;
  segment.batch = ThisPass();
  Keep(*to.entry, std::move(segment), op_number);
}

// What is kept is copied: a compiler uses the memory of an op's inputs again.

void KeepRows(const at::Tensor& a, const at::Tensor& d, int64_t id, int64_t bias_id,
              int64_t out_begin, int64_t samples, bool even) {
  const Destination to = Find(id, bias_id);
  if (to.keep) {
    KeepMatrices(to, ForSegment(a, true), ForSegment(d, true), out_begin, samples, even,
                 OpNumber());
  }
  if (to.dense) AddToGrad(to.param, out_begin, d.t().mm(a));
  if (to.dense_bias) AddToGrad(to.bias, out_begin, d.sum(0));
}

void KeepPatches(const at::Tensor& x, const at::Tensor& grad, at::IntArrayRef kernel,
                 at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                 int64_t groups, int64_t id, int64_t bias_id) {
  const Destination to = Find(id, bias_id);
  const Geometry geometry{stride.vec(), padding.vec(), dilation.vec(), groups};
  if (to.keep) {
    at::Tensor a = Patches(x.detach(), kernel, grad.sizes().slice(2), geometry);
    a = ForSegment(a, a.is_alias_of(x));
    at::Tensor d = Deltas(grad, groups);
    d = ForSegment(d, d.is_alias_of(grad));
    const uint64_t op_number = OpNumber();
    for (int64_t group = 0; group < groups; ++group) {
      KeepMatrices(to, a[group], d[group], group * d.size(2), x.size(0), /*even=*/true, op_number);
    }
  }
  if (to.dense) {
    const std::vector<int64_t> no_output_padding(kernel.size(), 0);
    AddToGrad(to.param, 0,
              std::get<1>(at::convolution_backward(
                  grad, x, to.param.detach().to(x.scalar_type()), at::OptionalIntArrayRef(), stride,
                  padding, dilation, /*transposed=*/false, no_output_padding, groups,
                  {false, true, false})));
  }
  if (to.dense_bias) AddToGrad(to.bias, 0, grad.transpose(0, 1).flatten(1).sum(1));
}

void KeepIndexed(const at::Tensor& indices, const at::Tensor& grad, int64_t padding_idx,
                 int64_t id) {
  const Destination to = Find(id, -1);
  const int64_t rows = indices.numel();
  Segment segment = IndexedRows(indices.reshape({rows}), grad.reshape({rows, grad.size(-1)}),
                                padding_idx, to.entry && to.entry->mode == CaptureMode::kSamples);
  if (to.dense) {
    AddToGrad(to.param, 0,
              at::zeros_like(to.param, to.param.options().dtype(segment.x.scalar_type()))
                  .index_add_(0, segment.index, segment.x));
  }
  if (!to.keep) return;
  segment.samples = indices.dim() > 0 ? indices.size(0) : 1;
  segment.batch = ThisPass();
  if (segment.x.is_alias_of(grad)) segment.x = segment.x.clone();
  Keep(*to.entry, std::move(segment), OpNumber());
}

// While a tracer asks for shapes: there are none.
void Nothing(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(stack, op.schema().arguments().size());
}

// A traced op without autograd: evaluation.

at::Tensor LinearOnly(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& b,
                      int64_t /*id*/, int64_t /*bias_id*/, int64_t /*out_begin*/) {
  return at::linear(x, w, b);
}

at::Tensor ConvolutionOnly(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& b,
                           at::IntArrayRef stride, at::IntArrayRef padding,
                           at::IntArrayRef dilation, int64_t groups, int64_t /*id*/,
                           int64_t /*bias_id*/) {
  const std::vector<int64_t> no_output_padding(stride.size(), 0);
  return at::convolution(x, w, b, stride, padding, dilation, /*transposed=*/false,
                         no_output_padding, groups);
}

at::Tensor EmbeddingOnly(const at::Tensor& w, const at::Tensor& indices, int64_t padding_idx,
                         int64_t /*id*/) {
  return at::embedding(w, indices, padding_idx);
}

TORCH_LIBRARY_FRAGMENT(dad, m) {
  m.def(
      "captured_linear(Tensor x, Tensor w, Tensor? b, int id, int bias_id, int out_begin) -> "
      "Tensor");
  m.def(
      "captured_convolution(Tensor x, Tensor w, Tensor? b, int[] stride, int[] padding, "
      "int[] dilation, int groups, int id, int bias_id) -> Tensor");
  m.def("captured_embedding(Tensor w, Tensor indices, int padding_idx, int id) -> Tensor");
  m.def(
      "keep_rows(Tensor a, Tensor d, int id, int bias_id, int out_begin, SymInt samples, bool "
      "even) -> ()");
  m.def(
      "keep_patches(Tensor x, Tensor grad, int[] kernel, int[] stride, int[] padding, "
      "int[] dilation, int groups, int id, int bias_id) -> ()");
  m.def("keep_indexed(Tensor indices, Tensor grad, int padding_idx, int id) -> ()");
}

TORCH_LIBRARY_IMPL(dad, CompositeExplicitAutograd, m) {
  m.impl("captured_linear", &LinearOnly);
  m.impl("captured_convolution", &ConvolutionOnly);
  m.impl("captured_embedding", &EmbeddingOnly);
}

TORCH_LIBRARY_IMPL(dad, CPU, m) {
  m.impl("keep_rows", &KeepRows);
  m.impl("keep_patches", &KeepPatches);
  m.impl("keep_indexed", &KeepIndexed);
}
TORCH_LIBRARY_IMPL(dad, CUDA, m) {
  m.impl("keep_rows", &KeepRows);
  m.impl("keep_patches", &KeepPatches);
  m.impl("keep_indexed", &KeepIndexed);
}
TORCH_LIBRARY_IMPL(dad, Meta, m) {
  const auto nothing = torch::CppFunction::makeFromBoxedFunction<&Nothing>;
  m.impl("keep_rows", nothing());
  m.impl("keep_patches", nothing());
  m.impl("keep_indexed", nothing());
}

TORCH_LIBRARY_IMPL(dad, Autograd, m) {
  m.impl("captured_linear", &Linear);
  m.impl("captured_convolution", &Convolution);
  m.impl("captured_embedding", &Embedding);
}

TORCH_LIBRARY_IMPL(dad, AutocastCPU, m) {
  m.impl("captured_linear", kAutocast<at::kCPU, &Linear>);
  m.impl("captured_convolution", kAutocast<at::kCPU, &Convolution>);
}
TORCH_LIBRARY_IMPL(dad, AutocastCUDA, m) {
  m.impl("captured_linear", kAutocast<at::kCUDA, &Linear>);
  m.impl("captured_convolution", kAutocast<at::kCUDA, &Convolution>);
}

}  // namespace

}  // namespace dad_torch
