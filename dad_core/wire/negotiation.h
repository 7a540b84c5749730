// What ranks tell each other about the requests they have ready.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "dad/method.h"
#include "dad/request.h"
#include "dad/status.h"
#include "dad/tensor_view.h"

namespace dad {

struct TensorMeta {
  DType dtype = DType::kFloat32;
  Shape shape;
};

// All fields of a request but its data.
struct RequestMeta {
  std::string name;
  OpKind kind = OpKind::kAllReduce;
  HostStep host_step = HostStep::kNone;
  ReduceOp op = ReduceOp::kSum;
  int root_rank = -1;
  double prescale = 1.0;
  double postscale = 1.0;
  Method method;  // of another rank: possibly malformed
  std::string terms;
  uint32_t stream = 0;
  bool recurring = true;
  DeviceType device = DeviceType::kCpu;
  std::vector<TensorMeta> tensors;
  std::vector<int> ranks;
};

RequestMeta MetaOf(const Request& request);

// The tensor of a request: the user's name for it, and the step of its way between hosts that this
// is.
struct TensorKey {
  std::string name;
  HostStep host_step = HostStep::kNone;

  auto operator<=>(const TensorKey&) const = default;
};

// The identity by which ranks match requests: a tensor may be in flight once for each kind.
struct RequestKey {
  std::string name;
  OpKind kind = OpKind::kAllReduce;
  HostStep host_step = HostStep::kNone;

  TensorKey tensor() const { return {name, host_step}; }
  bool operator==(const RequestKey&) const = default;
};
inline RequestKey KeyOf(const RequestMeta& meta) { return {meta.name, meta.kind, meta.host_step}; }

struct HashOfKey {
  size_t operator()(const TensorKey& key) const {
    return std::hash<std::string>()(key.name) + (static_cast<size_t>(key.host_step) << 4);
  }
  size_t operator()(const RequestKey& key) const {
    return (*this)(key.tensor()) + static_cast<size_t>(key.kind);
  }
};

// True when the first dimension belongs to each rank and may differ.
bool FirstDimensionVaries(OpKind kind);

// Empty when the two agree; otherwise the difference, as "shape [10,4] … [10,5]": the value of `a`,
// then that of `b`.
struct Difference {
  std::string what;
  std::string a;
  std::string b;
};
bool Differ(const RequestMeta& a, const RequestMeta& b, Difference* difference);

struct NegotiationMessage {
  // A request that the cache knows, identified by its number.
  struct Known {
    uint32_t cache_id = 0;
    uint32_t phase = 0;
  };
  struct Fresh {
    RequestMeta meta;
    uint32_t phase = 0;
  };

  bool joined = false;
  uint32_t joins = 0;  // the number of joins whose end this rank has seen
  // It has joined, but has requests open in other process sets, so the join cannot end yet.
  bool pending = false;
  // None of the requests that this rank has in flight has started: a step begins.
  bool begins = false;
  // Its line has limited how fast it could send so far.
  bool slow_line = false;
  // Asks all ranks to give up the schedule: `missing` held a batch up, `stale` have changed.
  bool recall = false;
  std::vector<uint32_t> missing;
  std::vector<uint32_t> stale;
  // In the round after a recall: how often this rank has committed to each batch.
  std::vector<uint32_t> committed;
  int64_t fusion_bytes = 0;  // rank 0's counts
  // Requests that this rank had announced as ready and withdraws; each may be in `known` or `fresh`
  // again.
  std::vector<RequestKey> withdrawn;
  std::vector<Known> known;  // sorted: the order of submits is not sent
  std::vector<Fresh> fresh;
};

std::vector<std::byte> Encode(const NegotiationMessage& message);
Result<NegotiationMessage> DecodeNegotiation(std::span<const std::byte> bytes);

}  // namespace dad
