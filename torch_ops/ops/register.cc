// The ops that torch.compile can trace: functional and blocking. Their shapes
// for tracing (fake kernels) and gradients are in python/dad/torch/graph_ops.py.
//
// A gradient that depends on rank or size is an op of its own: compiled graphs are cached
// on disk and shared by ranks and jobs, so a graph must not contain either.
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include "dad/engine.h"
#include "torch_ops/ops/collective.h"

namespace dad_torch {

namespace {

using dad::OpKind;
using dad::ReduceOp;

std::unique_ptr<Pending> Run(Collective collective) {
  auto pending = Pending::Start(std::move(collective));
  ThrowIfError(pending.status());
  ThrowIfError(pending.value()->Finish());
  return std::move(pending).value();
}

std::vector<at::Tensor> Reduce(OpKind kind, at::TensorList tensors, c10::string_view name,
                               int64_t op, double prescale, double postscale, int64_t process_set,
                               c10::IntArrayRef uncompressed_bytes = {}) {
  Collective collective;
  collective.kind = kind;
  collective.inputs = tensors.vec();
  collective.name = std::string(name);
  collective.op = static_cast<ReduceOp>(op);
  collective.prescale = prescale;
  collective.postscale = postscale;
  collective.process_set = static_cast<int>(process_set);
  collective.uncompressed_bytes = uncompressed_bytes.vec();
  return Run(std::move(collective))->results();
}

// `uncompressed_bytes`: of each tensor as the user has it; empty: as they are given.
std::vector<at::Tensor> AllReduce(at::TensorList tensors, c10::string_view name, int64_t op,
                                  double prescale, double postscale, int64_t process_set,
                                  c10::IntArrayRef uncompressed_bytes) {
  return Reduce(OpKind::kAllReduce, tensors, name, op, prescale, postscale, process_set,
                uncompressed_bytes);
}

std::vector<at::Tensor> Mean(at::TensorList tensors, int64_t process_set) {
  return AllReduce(tensors, "", static_cast<int64_t>(ReduceOp::kAverage), 1.0, 1.0, process_set,
                   {});
}

std::vector<at::Tensor> ReduceScatter(at::TensorList tensors, c10::string_view name, int64_t op,
                                      double prescale, double postscale, int64_t process_set) {
  return Reduce(OpKind::kReduceScatter, tensors, name, op, prescale, postscale, process_set);
}

std::vector<at::Tensor> AllGather(at::TensorList tensors, c10::string_view name,
                                  int64_t process_set) {
  return Reduce(OpKind::kAllGather, tensors, name, 0, 1.0, 1.0, process_set);
}

at::Tensor Broadcast(const at::Tensor& tensor, int64_t root_rank, c10::string_view name,
                     int64_t process_set) {
  Collective collective;
  collective.kind = OpKind::kBroadcast;
  collective.inputs = {tensor};
  collective.name = std::string(name);
  collective.root_rank = static_cast<int>(root_rank);
  collective.process_set = static_cast<int>(process_set);
  return Run(std::move(collective))->results()[0];
}

std::vector<int64_t> ToVector(const at::Tensor& splits) {
  at::Tensor flat = splits.to(at::kCPU, at::kLong).contiguous();
  return {flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel()};
}

// {rows received, how many came from each rank}; a list, since inductor cannot place an op
// with side effects and an open number of rows when it returns a tuple.
std::vector<at::Tensor> AllToAll(const at::Tensor& tensor, const at::Tensor& splits,
                                 c10::string_view name, int64_t process_set) {
  Collective collective;
  collective.kind = OpKind::kAllToAll;
  collective.inputs = {tensor};
  collective.name = std::string(name);
  collective.process_set = static_cast<int>(process_set);
  collective.splits = ToVector(splits);
  auto done = Run(std::move(collective));
  return {done->results()[0], at::tensor(done->received_splits(), splits.scalar_type())};
}

std::shared_ptr<dad::Engine> Running() {
  auto engine = dad::ProcessEngine();
  if (!engine) ThrowIfError(dad::Status::Aborted("dad was shut down during the backward pass"));
  return engine;
}

// Rows of all ranks before this one, for each of the tensors that were gathered.
std::vector<int64_t> RowsBefore(c10::IntArrayRef rows, int64_t process_set) {
  auto all = AllGather({at::tensor(rows, at::kLong).unsqueeze(0)}, "", process_set)[0];
  auto engine = Running();
  std::vector<int64_t> before(rows.size(), 0);
  auto counts = all.accessor<int64_t, 2>();
  const auto members = engine->ProcessSetRanks(static_cast<int>(process_set));
  for (size_t member = 0; member < members.size(); ++member) {
    if (members[member] == engine->world().rank) break;
    for (size_t i = 0; i < before.size(); ++i) before[i] += counts[member][i];
  }
  return before;
}

// The mean over ranks of the gradients, of which each takes the rows it had put in.
std::vector<at::Tensor> AllGatherBackward(at::TensorList grads, c10::IntArrayRef rows,
                                          int64_t process_set) {
  auto means = Mean(grads, process_set);
  const auto before = RowsBefore(rows, process_set);
  for (size_t i = 0; i < means.size(); ++i) {
    means[i] = means[i].narrow(0, before[i], rows[i]).clone();
  }
  return means;
}

// What each rank contributed to its gradient, from the gradients of all parts. `rows` is for
// the tracer only.
std::vector<at::Tensor> ReduceScatterBackward(at::TensorList grads, c10::IntArrayRef /*rows*/,
                                              int64_t op, double prescale, double postscale,
                                              int64_t process_set) {
  double factor = prescale * postscale;
  if (static_cast<ReduceOp>(op) == ReduceOp::kSum) {
    factor *= static_cast<double>(Running()->ProcessSetRanks(static_cast<int>(process_set)).size());
  }
  auto gathered = AllGather(grads, "", process_set);
  if (factor != 1.0) {
    for (at::Tensor& grad : gathered) grad.mul_(factor);
  }
  return gathered;
}

// The mean over ranks on the root, which alone had an influence; zeros elsewhere.
at::Tensor BroadcastBackward(const at::Tensor& grad, int64_t root_rank, int64_t process_set) {
  auto mean = Mean({grad}, process_set)[0];
  if (Running()->world().rank != root_rank) mean.zero_();
  return mean;
}

// Sends every row back to where it came from. `rows` is for the tracer only.
at::Tensor AllToAllBackward(const at::Tensor& grad, const at::Tensor& received_splits,
                            int64_t /*rows*/, int64_t process_set) {
  return AllToAll(grad, received_splits, "", process_set)[0];
}

TORCH_LIBRARY(dad, m) {
  m.def(
      "allreduce(Tensor[] tensors, str name, int op, float prescale, float postscale, "
      "int process_set, SymInt[] uncompressed_bytes) -> Tensor[]");
  m.def(
      "reducescatter(Tensor[] tensors, str name, int op, float prescale, float postscale, "
      "int process_set) -> Tensor[]");
  m.def(
      "reducescatter_backward(Tensor[] grads, SymInt[] rows, int op, float prescale, "
      "float postscale, int process_set) -> Tensor[]");
  m.def("allgather(Tensor[] tensors, str name, int process_set) -> Tensor[]");
  m.def("allgather_backward(Tensor[] grads, SymInt[] rows, int process_set) -> Tensor[]");
  m.def("broadcast(Tensor tensor, int root_rank, str name, int process_set) -> Tensor");
  m.def("broadcast_backward(Tensor grad, int root_rank, int process_set) -> Tensor");
  m.def("alltoall(Tensor tensor, Tensor splits, str name, int process_set) -> Tensor[]");
  m.def(
      "alltoall_backward(Tensor grad, Tensor received_splits, SymInt rows, int process_set) "
      "-> Tensor");
}

// For every backend: what is not a dense tensor of a device that we know gets our error, not the
// dispatcher's.
TORCH_LIBRARY_IMPL(dad, CompositeExplicitAutograd, m) {
  m.impl("allreduce", &AllReduce);
  m.impl("reducescatter", &ReduceScatter);
  m.impl("reducescatter_backward", &ReduceScatterBackward);
  m.impl("allgather", &AllGather);
  m.impl("allgather_backward", &AllGatherBackward);
  m.impl("broadcast", &Broadcast);
  m.impl("broadcast_backward", &BroadcastBackward);
  m.impl("alltoall", &AllToAll);
  m.impl("alltoall_backward", &AllToAllBackward);
}

}  // namespace

}  // namespace dad_torch
