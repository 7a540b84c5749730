#include "runtime/lane/validate.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_set>

#include "dad/views.h"
#include "exchange/exchange.h"
#include "util/mutex.h"

namespace dad {
namespace {

Status Wrong(const Request& request, const std::string& what) {
  return Status::InvalidArgument(std::string(Name(request.kind)) + " \"" + request.name +
                                 "\": " + what);
}

std::string Place(const TensorView& view) {
  return view.device == DeviceType::kCpu ? Name(view.device)
                                         : "CUDA device " + std::to_string(view.device_index);
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

// The conditions that an exchange relies on, so that it cannot fail once the ranks have agreed.
Status CheckLayer(const Request& request, const LayerShape& shape, const LayerInput& layer) {
  auto has_shape = [](const TensorView& view, int64_t rows, int64_t cols) {
    return view.shape.size() == 2 && view.shape[0] == rows && view.shape[1] == cols &&
           IsFloating(view.dtype) && (view.data != nullptr || rows * cols == 0);
  };
  for (const RowsSegment& segment : layer.rows) {
    const int64_t rows = segment.a.shape.empty() ? 0 : segment.a.shape[0];
    if (!has_shape(segment.a, rows, shape.in)) {
      return Wrong(request, "rows of shape " + ToString(segment.a.shape) + ", expected N x " +
                                std::to_string(shape.in));
    }
    if (segment.d.data == nullptr && segment.d.shape.empty()) continue;  // follows from above
    const int64_t count = segment.d.shape.size() == 2 ? segment.d.shape[1] : -1;
    if (count < 0 || segment.out_begin < 0 || segment.out_begin + count > shape.out ||
        !has_shape(segment.d, rows, count)) {
      return Wrong(request, "gradients of rows of shape " + ToString(segment.d.shape) +
                                " from row " + std::to_string(segment.out_begin) + ", expected " +
                                std::to_string(rows) + " x " + std::to_string(shape.out));
    }
  }
  for (const IndexedSegment& segment : layer.indexed) {
    const int64_t rows = segment.index.num_elements();
    if (segment.index.dtype != DType::kInt64 || !has_shape(segment.x, rows, shape.in)) {
      return Wrong(request, "indexed rows of shape " + ToString(segment.x.shape) + ", expected " +
                                std::to_string(rows) + " x " + std::to_string(shape.in));
    }
    const auto* index = static_cast<const int64_t*>(segment.index.data);
    if (segment.index.device != DeviceType::kCpu) continue;  // checked when it is on the host
    if (std::any_of(index, index + rows, [&](int64_t i) { return i < 0 || i >= shape.out; })) {
      return Wrong(request,
                   "an index lies outside of the tensor's " + std::to_string(shape.out) + " rows");
    }
  }
  auto elements = [](const TensorView& view) {
    return view.data == nullptr ? int64_t{-1} : view.num_elements();
  };
  const int64_t weight = shape.out * shape.in;
  if (layer.dense.data != nullptr && elements(layer.dense) != weight) {
    return Wrong(request, "a dense part of shape " + ToString(layer.dense.shape));
  }
  if (!shape.pass && weight > 0 && elements(layer.output) != weight) {
    return Wrong(request, "an output of shape " + ToString(layer.output.shape) + ", expected " +
                              std::to_string(shape.out) + " x " + std::to_string(shape.in));
  }
  if (!shape.pass && shape.bias && shape.out > 0 && elements(layer.output_bias) != shape.out) {
    return Wrong(request, "an output for the bias of shape " + ToString(layer.output_bias.shape));
  }
  return Status::Ok();
}

Status CheckDevices(const Request& request) {
  const TensorView& first = request.tensors[0].input;
  Status status;
  for (const Contribution& tensor : request.tensors) {
    ForEachView(tensor, [&](const TensorView& view, bool) {
      if (view.data == nullptr || !status.ok()) return;
      if (view.device == first.device && view.device_index == first.device_index) return;
      status = Wrong(request, "its tensors are not all in one place: on " + Place(first) +
                                  " and on " + Place(view));
    });
  }
  return status;
}

// The methods for which an exchange has been made. Every step asks again, and making an exchange
// takes longer than all other checks.
class AcceptedMethods {
 public:
  bool Contains(const std::string& key) {
    MutexLock lock(mutex_);
    return keys_.contains(key);
  }
  void Add(const std::string& key) {
    constexpr size_t kMost = 1 << 16;
    MutexLock lock(mutex_);
    if (keys_.size() >= kMost) keys_.clear();
    keys_.insert(key);
  }
  // Everything that the result depends on.
  static std::string KeyOf(const Request& request) {
    std::string key = request.method.text();
    const TensorView& input = request.tensors[0].input;
    for (const int64_t part :
         {int64_t{static_cast<int>(request.op)}, int64_t{static_cast<int>(input.dtype)},
          static_cast<int64_t>(input.shape.size()), input.num_elements()}) {
      key.append(reinterpret_cast<const char*>(&part), sizeof part);
    }
    return key;
  }

 private:
  Mutex mutex_;
  std::unordered_set<std::string> keys_ GUARDED_BY(mutex_);
};

AcceptedMethods& TheAcceptedMethods() {
  static auto* const methods = new AcceptedMethods;
  return *methods;
}

Status CheckMethod(const Request& request) {
  if (request.kind != OpKind::kAllReduce || request.tensors.size() != 1) {
    return Wrong(request,
                 "method \"" + request.method.text() + "\" is for the allreduce of one tensor");
  }
  if (!request.method.status().ok()) return Wrong(request, request.method.status().message());
  const std::vector<LayerShape>& layers = request.method.layers();
  const Contribution& mine = request.tensors[0];
  if (mine.layers.size() != layers.size()) {
    return Wrong(request, std::to_string(mine.layers.size()) + " layers given, the method has " +
                              std::to_string(layers.size()));
  }
  int64_t elements = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    DAD_RETURN_IF_ERROR(CheckLayer(request, layers[l], mine.layers[l]));
    if (!layers[l].pass) elements += layers[l].num_elements();
    const bool derives = layers.size() > 1;
    if (derives && layers[l].out * layers[l].in > 0 && mine.layers[l].weight.data == nullptr) {
      return Wrong(request, "a layer of a chain without its weight");
    }
  }
  if (!layers.empty() && elements != mine.input.num_elements()) {
    return Wrong(request, "its layers have " + std::to_string(elements) + " elements, " +
                              std::to_string(mine.input.num_elements()) + " were announced");
  }
  const std::string key = AcceptedMethods::KeyOf(request);
  if (TheAcceptedMethods().Contains(key)) return Status::Ok();
  TensorSpec spec;
  spec.name = request.name;
  spec.op = request.op;
  spec.dtype = mine.input.dtype;
  spec.shape = mine.input.shape;
  spec.method = request.method;
  DAD_RETURN_IF_ERROR(MakeExchange(spec, {}, 0, {}).status());
  TheAcceptedMethods().Add(key);
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
  DAD_RETURN_IF_ERROR(CheckDevices(request));
  if (!request.method.none()) return CheckMethod(request);
  for (const Contribution& tensor : request.tensors) {
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
