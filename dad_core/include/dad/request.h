// What a framework hands to the engine: one collective over one tensor, or over
// a group of tensors that is done as a whole or not at all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dad/contribution.h"
#include "dad/export.h"
#include "dad/method.h"
#include "dad/status.h"
#include "dad/tensor_view.h"

namespace dad {

enum class OpKind : uint8_t {
  kAllReduce = 0,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kReduceScatter,
  kBarrier,
  kJoin,
  kAddProcessSet,
  kRemoveProcessSet,
};
DAD_EXPORT const char* Name(OpKind kind);  // "allreduce"

enum class ReduceOp : uint8_t { kSum = 0, kAverage, kMin, kMax, kProduct, kAdasum };
DAD_EXPORT const char* Name(ReduceOp op);  // "Sum"

// A sum that goes from host to host takes several requests with the user's name (dad/hierarchy.h).
// Requests of different steps are different requests.
enum class HostStep : uint8_t {
  kNone = 0,  // an ordinary request
  kInside,    // the sum inside a host
  kAcross,    // the sum of the hosts
  kVerdict,   // from the leader to its host: how that ended
  kDown,      // from the leader to its host: the result
  kOrphans,   // between all ranks: what could not go across
};
DAD_EXPORT const char* Name(HostStep step);  // "inside"; "" for kNone

// Allocates an output once its shape is known (allgather, alltoall, reducescatter). Called on the
// worker thread, so it must not need the GIL. An error fails the request on this rank.
using OutputAllocator =
    std::function<Result<TensorView>(int tensor_index, DType dtype, const Shape& shape)>;

// The name of a request for an internal process set begins with this. Such a set is not listed, and
// users may have one of the same ranks.
inline constexpr const char* kHiddenSet = "dad: ranks ";

struct Request {
  std::string name;  // the same on all ranks; unique among requests of a kind in flight
  OpKind kind = OpKind::kAllReduce;
  ReduceOp op = ReduceOp::kSum;
  int root_rank = -1;  // global rank; broadcast only
  double prescale = 1.0;
  double postscale = 1.0;
  int process_set = 0;  // 0: all ranks
  Method method;        // how the tensor is compressed; ranks must agree on its text
  // Anything else that ranks must agree on, as text; it is only compared. A barrier at which ranks
  // meet to plan for a tensor has their compression here.
  std::string terms;
  // Requests of different streams never share a predicted message: an optimizer
  // gives its gradients a stream of their own, so that a metric which is reduced
  // now and then does not hold them up.
  uint32_t stream = 0;
  // The step of this process that the request belongs to; 0: none. When ranks disagree on one
  // request of a step, those that have not begun end with the same error on all ranks: a rank that
  // sees the error sends nothing more in that step, and the others would wait for it.
  uint64_t step = 0;
  HostStep host_step = HostStep::kNone;
  // Each rank contributes the sum of its host.
  bool sums_of_hosts = false;
  // False if the name is used once (a running number), so that it is not worth remembering.
  bool recurring = true;

  std::vector<Contribution> tensors;
  OutputAllocator allocate;
  // Keeps the memory behind the views alive. Dropped by the thread that waits
  // (a framework may need its own lock to release a tensor), else with the ticket.
  std::shared_ptr<void> keep_alive;

  std::vector<int> ranks;  // kAddProcessSet: members; kRemoveProcessSet: {id}
};

}  // namespace dad
