// What the gradient of a parameter is made of, taken where autograd would form it.
//
// A linear map gives a gradient Dᵀ A: A is its input and D the gradient at its output, one row
// each per sample, token or position. For a tracked parameter the ops below keep A and D instead
// of multiplying them; what they keep is a list of segments. At any time between two steps
//
//   the parameter's local gradient = sum of its segments + param.grad
//
// where .grad holds what came from uses that are not captured (none: it stays undefined). So
// capture may decline any single use and the sum is still right.
//
// Captured, on dense CPU and CUDA tensors: aten::linear, aten::convolution (not transposed),
// aten::embedding and aten::_embedding_bag, with the parameter itself, a block of its rows, or
// autocast's copy of either as the weight; in the mode kSamples layer_norm, rms_norm, group_norm,
// batch_norm and instance_norm, too. Whoever calls these ops, in Python or in C++, is seen.
//
// Readiness: autograd calls a parameter's post-accumulate-grad hooks once per backward() as
// always, with .grad untouched when all its uses were captured.
//
// Thread-safe. Nothing here holds a lock while it calls torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace dad_torch {

enum class CaptureMode : int {
  kOff = 0,           // torch's own path; nothing is kept
  kRows = 1,          // segments instead of the gradient, which is never computed
  kRowsAndDense = 2,  // segments, and the same gradient in .grad as well: here the two are equal
  // kRows for those who look at single samples: wherever it can be done, the rows of one sample are
  // adjacent and as many as those of any other, also where an op ran several times in a batch; and
  // the weight and the bias of a norm layer have segments, each of its own. Such a segment is
  // larger than the gradient. Its D has the sums over the positions of a sample of dy ∘ x̂, or of
  // dy, and its A is ones: n × 1 is the parameter's matrix. (If the parameter has more dimensions,
  // the same numbers come as indexed rows.)
  kSamples = 3,
};

// What lies between two linear maps of a chain.
enum class Activation : int {
  kRelu,
  kLeakyRelu,  // SegmentLink::slope, which is positive
  kTanh,
  kSigmoid,
  kGelu,
  kGeluTanh,  // approximate="tanh"
  kSilu,
};

// D of this segment = (D_u W_u) ∘ φ'(h), row by row, where u is the upper segment, W_u its whole
// weight, φ the activation, and h this segment's A Wᵀ + b; A_u = φ(h). Seen to hold in the backward
// pass that made the segments: what arrived at φ and at this op was what the one above had
// returned, and nothing else was added to it or done with it.
struct SegmentLink {
  Activation activation = Activation::kRelu;
  double slope = 0.0;
  int upper_id = -1;          // of the upper parameter, as TrackParameter gave it
  uint64_t upper_serial = 0;  // of its segment
  int64_t upper_index = 0;    // and the place of that segment in the list it is taken with
};

enum class SegmentKind : int {
  // The rows out_begin … out_begin + d.size(1) of the parameter, seen as a matrix with shape[0]
  // rows, get dᵀ a. With has_bias, the same rows of its bias get the sum of d's rows.
  kRows,
  // Row index[i] of the parameter gets x[i]; an index may occur more than once.
  kIndexed,
};

// Tensors are contiguous, detached, and of the dtype in which the op ran (half under autocast).
struct Segment {
  SegmentKind kind = SegmentKind::kRows;
  at::Tensor a;  // rows: N × in (convolution: N × in/groups·kernel)
  at::Tensor d;  // rows: N × out
  int64_t out_begin = 0;
  bool has_bias = false;
  at::Tensor index;  // indexed: N, int64
  at::Tensor x;      // indexed: N × dim
  // Samples that the rows are of: the leading dimension of the op's input, unless the first op of
  // the batch says that another one is meant (RowLayout in capture_node.h).
  int64_t samples = 0;
  bool even = true;    // the rows of one sample are adjacent, and each has N / samples
  uint64_t batch = 0;  // the same for what went forward together
  std::optional<SegmentLink> link;
  uint64_t serial = 0;  // unique in the process, rising
};

// Tracks a parameter (a leaf) or, when it is tracked, sets its mode and its owner: whoever takes
// the segments, an optimizer. The id stays the same until it is untracked. Holds no reference: a
// parameter that is gone is forgotten.
int TrackParameter(const at::Tensor& param, CaptureMode mode, int owner = 0);
// Takes effect at once, also for ops that ran forward under the old mode; but what ran forward
// under kOff is never captured.
void SetCaptureMode(const at::Tensor& param, CaptureMode mode);
// False, and nothing done, for a parameter that is not tracked or has another owner by now.
bool UntrackParameter(const at::Tensor& param, int owner = 0);

// Lets the bias ride in the weight's segments (has_bias) where an op uses the two together; both
// must be tracked. Otherwise the first op that uses a tracked bias with a tracked weight pairs
// them, unless they have different owners. A bias belongs to one weight: with any other its
// gradient goes to .grad.
void FoldBias(const at::Tensor& weight, const at::Tensor& bias);
// The bias that rides with `weight`; undefined if none does.
at::Tensor FoldedBias(const at::Tensor& weight);

// The segments since the last call, oldest first; the caller has them alone, on the current stream
// of their device, which is made to wait for them if they were made on another one. Throws if a
// kept tensor was changed in place since (the gradient cannot be had any more).
std::vector<Segment> TakeSegments(const at::Tensor& param);
// How many segments TakeSegments would return.
size_t CountSegments(const at::Tensor& param);

// Why the parameter's gradient, or some of it, did not come as segments since BeginCaptureStep;
// empty if nothing was declined and there were segments.
std::string CaptureReason(const at::Tensor& param);

// The leading dimension of the input of the earliest op whose segments went to one of `params`
// since BeginCaptureStep; -1 if there was none.
int64_t CaptureSamples(at::TensorList params);

// Starts a step for these parameters: leftover segments, reasons and sample counts are dropped.
void BeginCaptureStep(at::TensorList params);

}  // namespace dad_torch
