#include "torch_ops/capture/graph.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <typeinfo>

#include "torch_ops/capture/hooks.h"

namespace dad_torch {

namespace {

namespace ag = torch::autograd;
namespace gen = torch::autograd::generated;

// Histories of weights are short: a block, a cast.
constexpr int kMaxSteps = 8;

// All node types here are final in practice, and comparing typeid is cheaper than dynamic_cast.
template <typename T>
const T* As(const ag::Node* node) {
  return typeid(*node) == typeid(T) ? static_cast<const T*>(node) : nullptr;
}

std::optional<int64_t> Int(const c10::SymInt& value) { return value.maybe_as_int(); }

bool IsFirst(int64_t dim, size_t dims) { return dim == 0 || dim == -static_cast<int64_t>(dims); }

// The first row of output `number` of a node that cuts its input into blocks of rows.
std::optional<int64_t> FirstRow(const ag::Node* node, uint32_t number) {
  if (const auto* split = As<gen::SplitBackward0>(node)) {
    const auto size = Int(split->split_size);
    if (!size || !IsFirst(split->dim, split->self_sym_sizes.size())) return std::nullopt;
    return *size * number;
  }
  if (const auto* split = As<gen::SplitWithSizesBackward0>(node)) {
    if (!IsFirst(split->dim, split->self_sym_sizes.size())) return std::nullopt;
    int64_t begin = 0;
    for (uint32_t i = 0; i < number; ++i) {
      const auto size = Int(split->split_sizes[i]);
      if (!size) return std::nullopt;
      begin += *size;
    }
    return begin;
  }
  if (const auto* slice = As<gen::SliceBackward0>(node)) {
    if (!IsFirst(slice->dim, slice->self_sym_sizes.size()) || Int(slice->step) != 1) {
      return std::nullopt;
    }
    const auto rows = Int(slice->self_sym_sizes[0]);
    const auto start = slice->start ? Int(*slice->start) : 0;
    if (!rows || !start) return std::nullopt;
    return std::clamp<int64_t>(*start < 0 ? *start + *rows : *start, 0, *rows);
  }
  return std::nullopt;
}

bool IsReshape(const ag::Node* node) {
  return As<gen::ViewBackward0>(node) || As<gen::UnsafeViewBackward0>(node) ||
         As<gen::ReshapeAliasBackward0>(node);
}

const ag::Node* SkipReshapes(const ag::Node* node) {
  for (int step = 0; node && step < kMaxSteps && IsReshape(node); ++step) {
    node = node->next_edge(0).function.get();
  }
  return node;
}

const std::vector<c10::SymInt>* SizesBeforeReshape(const ag::Node* node) {
  if (const auto* view = As<gen::ViewBackward0>(node)) return &view->self_sym_sizes;
  if (const auto* view = As<gen::UnsafeViewBackward0>(node)) return &view->self_sym_sizes;
  if (const auto* view = As<gen::ReshapeAliasBackward0>(node)) return &view->self_sym_sizes;
  return nullptr;
}

// Follows an edge to a tracked parameter. `device` is that of the tensor whose history it is.
std::optional<Use> Follow(ag::Edge edge, at::Device device, int64_t rows) {
  int64_t begin = 0;
  for (int step = 0; edge.is_valid() && step < kMaxSteps; ++step) {
    const ag::Node* node = edge.function.get();
    if (const auto* leaf = As<ag::AccumulateGrad>(node)) {
      EntryPtr entry = FindEntry(leaf->variable.unsafeGetTensorImpl());
      if (!entry) return std::nullopt;
      return Use{std::move(entry), begin, rows == leaf->variable.size(0)};
    }
    if (const auto* copy = As<gen::ToCopyBackward0>(node)) {
      if (copy->self_options.device() != device) return std::nullopt;
    } else if (const auto first = FirstRow(node, edge.input_nr)) {
      begin += *first;
    } else {
      return std::nullopt;
    }
    edge = node->next_edge(0);
  }
  return std::nullopt;
}

bool SetActivation(const ag::Node* node, ActivationMatch& match) {
  if (As<gen::ReluBackward0>(node)) {
    match.activation = Activation::kRelu;
  } else if (const auto* leaky = As<gen::LeakyReluBackward0>(node)) {
    match.activation = Activation::kLeakyRelu;
    match.slope = leaky->negative_slope.toDouble();
    return match.slope > 0;  // else the output does not tell the sign of the input
  } else if (const auto* in_place = As<gen::LeakyReluBackward1>(node)) {
    match.activation = Activation::kLeakyRelu;
    match.slope = in_place->negative_slope.toDouble();
    return match.slope > 0;
  } else if (As<gen::TanhBackward0>(node)) {
    match.activation = Activation::kTanh;
  } else if (As<gen::SigmoidBackward0>(node)) {
    match.activation = Activation::kSigmoid;
  } else if (const auto* gelu = As<gen::GeluBackward0>(node)) {
    if (gelu->approximate != "none" && gelu->approximate != "tanh") return false;
    match.activation = gelu->approximate == "tanh" ? Activation::kGeluTanh : Activation::kGelu;
  } else if (As<gen::SiluBackward0>(node)) {
    match.activation = Activation::kSilu;
  } else {
    return false;
  }
  return true;
}

std::atomic<HookJudge>& TheHookJudge() {
  static std::atomic<HookJudge> judge{nullptr};
  return judge;
}

class PassHook : public ag::FunctionPostHook {
 public:
  explicit PassHook(std::shared_ptr<ChainLink> link) : link_(std::move(link)) {}
  ag::variable_list operator()(const ag::variable_list& outputs,
                               const ag::variable_list& inputs) override {
    if (outputs.size() == 1 && inputs.size() == 1) link_->Pass(inputs[0], outputs[0]);
    return outputs;
  }

 private:
  std::shared_ptr<ChainLink> link_;
};

}  // namespace

std::optional<Use> FindUse(const at::Tensor& tensor) {
  if (!tensor.grad_fn()) {
    EntryPtr entry = FindEntry(tensor.unsafeGetTensorImpl());
    if (!entry) return std::nullopt;
    return Use{std::move(entry), 0, true};
  }
  return Follow(ag::impl::gradient_edge(tensor), tensor.device(), tensor.size(0));
}

std::optional<RepeatedUse> FindRepeatedUse(const at::Tensor& tensor) {
  const ag::Node* node = tensor.grad_fn().get();
  const auto* repeat = node ? As<gen::RepeatBackward0>(node) : nullptr;
  if (!repeat || repeat->repeats.size() != 1 || repeat->self_sym_sizes.size() != 1) {
    return std::nullopt;
  }
  const auto times = Int(repeat->repeats[0]);
  const auto size = Int(repeat->self_sym_sizes[0]);
  if (!times || !size) return std::nullopt;
  auto use = Follow(node->next_edge(0), tensor.device(), *size);
  if (!use || !use->whole) return std::nullopt;
  return RepeatedUse{std::move(use->entry), *times};
}

LeadingDimension LeadingBeforeReshape(const at::Tensor& matrix) {
  const int64_t rows = matrix.size(0);
  LeadingDimension leading{rows, false};
  const ag::Node* node = matrix.grad_fn().get();
  for (int step = 0; node && step < kMaxSteps; ++step) {
    const auto* sizes = SizesBeforeReshape(node);
    if (!sizes) break;
    const auto first = sizes->empty() ? std::nullopt : Int(sizes->front());
    if (first && *first > 0 && rows % *first == 0) leading.size = *first;
    node = node->next_edge(0).function.get();
  }
  if (node && As<gen::CloneBackward0>(node)) node = node->next_edge(0).function.get();
  if (!node) return leading;
  if (const auto* permute = As<gen::PermuteBackward0>(node)) {
    leading.was_behind = !permute->dims.empty() && permute->dims[0] != 0;
  } else if (const auto* transpose = As<gen::TransposeBackward0>(node)) {
    leading.was_behind = transpose->dim0 == 0 || transpose->dim1 == 0;
  }
  return leading;
}

void SetHookJudge(HookJudge judge) { TheHookJudge() = judge; }

bool HasHooks(const ag::Edge& edge) {
  for (ag::Node* node = edge.function.get(); node; node = node->next_edge(0).function.get()) {
    if (!node->pre_hooks().empty()) return true;
    const bool on_tensor = !node->tensor_pre_hooks().empty();
    if (const auto* leaf = As<ag::AccumulateGrad>(node)) {
      const HookJudge judge = TheHookJudge();
      return on_tensor && (judge == nullptr || judge(leaf->variable));
    }
    if (on_tensor) return true;
    if (node->num_outputs() == 0) return false;
    if (!node->post_hooks().empty() || !node->retains_grad_hooks().empty()) return true;
  }
  return false;
}

std::optional<ActivationMatch> MatchActivation(const at::Tensor& input) {
  ActivationMatch match;
  const ag::Node* node = SkipReshapes(input.grad_fn().get());
  if (!node || !SetActivation(node, match)) return std::nullopt;
  match.node = const_cast<ag::Node*>(node);
  match.below = const_cast<ag::Node*>(SkipReshapes(node->next_edge(0).function.get()));
  if (!match.below) return std::nullopt;
  return match;
}

std::shared_ptr<ChainLink> ChainLink::Through(const ActivationMatch& match) {
  auto link = std::make_shared<ChainLink>();
  link->activation_ = match.node;
  link->link_.activation = match.activation;
  link->link_.slope = match.slope;
  match.node->add_post_hook(std::make_unique<PassHook>(link));
  return link;
}

void ChainLink::Offer(const at::Tensor& grad, int upper_id, Place place) {
  std::lock_guard lock(mutex_);
  link_.upper_id = upper_id;
  link_.upper_serial = place.serial;
  link_.upper_index = place.index;
  Hold(Stage::kOffered, grad);
}

void ChainLink::Pass(const at::Tensor& grad, const at::Tensor& result) {
  std::lock_guard lock(mutex_);
  Hold(Holds(Stage::kOffered, grad) ? Stage::kPassed : Stage::kEmpty, result);
}

std::optional<SegmentLink> ChainLink::Accept(const at::Tensor& grad) {
  std::lock_guard lock(mutex_);
  const bool proven = Holds(Stage::kPassed, grad);
  Hold(Stage::kEmpty, {});
  if (!proven) return std::nullopt;
  return link_;
}

bool ChainLink::Holds(Stage stage, const at::Tensor& grad) const {
  if (stage_ != stage || task_ != ag::get_current_graph_task_id() || !grad.defined()) return false;
  // A reshape on the way makes another tensor of the same memory. Rows stay rows: the ops check
  // that one row above is as long as one row below.
  return held_._version() == version_ && held_.is_contiguous() && grad.is_contiguous() &&
         held_.numel() == grad.numel() && held_.scalar_type() == grad.scalar_type() &&
         held_.storage().is_alias_of(grad.storage()) &&
         held_.storage_offset() == grad.storage_offset();
}

void ChainLink::Hold(Stage stage, const at::Tensor& grad) {
  stage_ = grad.defined() ? stage : Stage::kEmpty;
  held_ = stage_ == Stage::kEmpty ? at::Tensor() : grad;
  version_ = held_.defined() ? held_._version() : 0;
  task_ = ag::get_current_graph_task_id();
}

}  // namespace dad_torch
