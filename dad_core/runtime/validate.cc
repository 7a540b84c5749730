#include "runtime/validate.h"

#include <algorithm>
#include <numeric>

namespace dad {
namespace {

Status Wrong(const Request& request, const std::string& what) {
  return Status::InvalidArgument(std::string(Name(request.kind)) + " \"" + request.name +
                                 "\": " + what);
}

Status CheckSplits(const Request& request, const Contribution& tensor, size_t num_ranks) {
  if (tensor.input.shape.empty()) return Wrong(request, "a tensor without dimensions has no rows");
  const int64_t rows = tensor.input.shape[0];
  if (tensor.splits.empty()) {
    if (rows % static_cast<int64_t>(num_ranks) == 0) return Status::Ok();
    return Wrong(request, std::to_string(rows) + " rows cannot be divided evenly among " +
                              std::to_string(num_ranks) + " ranks; give splits");
  }
  if (tensor.splits.size() != num_ranks) {
    return Wrong(request, "expected " + std::to_string(num_ranks) + " splits, got " +
                              std::to_string(tensor.splits.size()));
  }
  if (std::any_of(tensor.splits.begin(), tensor.splits.end(), [](int64_t s) { return s < 0; })) {
    return Wrong(request, "splits must not be negative");
  }
  const int64_t sum = std::accumulate(tensor.splits.begin(), tensor.splits.end(), int64_t{0});
  if (sum != rows) {
    return Wrong(request, "splits add up to " + std::to_string(sum) + ", the tensor has " +
                              std::to_string(rows) + " rows");
  }
  return Status::Ok();
}

Status CheckProcessSet(const Request& request, int world_size) {
  if (request.ranks.empty()) return Wrong(request, "no ranks given");
  if (request.kind == OpKind::kRemoveProcessSet) {
    return request.ranks[0] > 0 ? Status::Ok()
                                : Wrong(request, "the global process set cannot be removed");
  }
  std::vector<int> sorted = request.ranks;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0 || sorted.back() >= world_size) {
    return Wrong(request, "ranks must lie in 0.." + std::to_string(world_size - 1) + ", got " +
                              ToString(Shape(sorted.begin(), sorted.end())));
  }
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    return Wrong(request, "a rank is given twice");
  }
  return Status::Ok();
}

}  // namespace

Status Validate(const Request& request, int my_rank, std::span<const int> ranks, int world_size) {
  if (request.name.empty()) return Wrong(request, "a request needs a name");
  if (request.kind == OpKind::kAddProcessSet || request.kind == OpKind::kRemoveProcessSet) {
    return CheckProcessSet(request, world_size);
  }
  if (std::find(ranks.begin(), ranks.end(), my_rank) == ranks.end()) {
    return Wrong(request, ranks.empty()
                              ? "there is no process set " + std::to_string(request.process_set)
                              : "rank " + std::to_string(my_rank) + " is not in process set " +
                                    std::to_string(request.process_set));
  }
  if (request.kind == OpKind::kJoin || request.kind == OpKind::kBarrier) return Status::Ok();
  if (request.tensors.empty()) return Wrong(request, "no tensor given");
  if (request.kind == OpKind::kBroadcast &&
      std::find(ranks.begin(), ranks.end(), request.root_rank) == ranks.end()) {
    return Wrong(request, "root rank " + std::to_string(request.root_rank) +
                              " is not among the ranks of the process set");
  }
  for (const Contribution& tensor : request.tensors) {
    if (tensor.input.device != DeviceType::kCpu) {
      return Wrong(request, "only CPU tensors are supported in this version");
    }
    if (request.kind == OpKind::kAllReduce && request.op == ReduceOp::kAdasum &&
        !IsFloating(tensor.input.dtype)) {
      return Wrong(request,
                   std::string("Adasum needs a floating type, got ") + Name(tensor.input.dtype));
    }
    if (request.kind == OpKind::kReduceScatter) {
      if (tensor.input.shape.empty()) {
        return Wrong(request, "a tensor without dimensions cannot be scattered");
      }
      if (request.op == ReduceOp::kAdasum) return Wrong(request, "Adasum is for allreduce only");
    }
    if (request.kind == OpKind::kAllToAll) {
      DAD_RETURN_IF_ERROR(CheckSplits(request, tensor, ranks.size()));
    }
  }
  return Status::Ok();
}

}  // namespace dad
