#include "dad/request.h"

namespace dad {

const char* Name(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce: return "allreduce";
    case OpKind::kAllGather: return "allgather";
    case OpKind::kBroadcast: return "broadcast";
    case OpKind::kAllToAll: return "alltoall";
    case OpKind::kReduceScatter: return "reducescatter";
    case OpKind::kBarrier: return "barrier";
    case OpKind::kJoin: return "join";
    case OpKind::kAddProcessSet: return "add_process_set";
    case OpKind::kRemoveProcessSet: return "remove_process_set";
  }
  return "unknown";
}

const char* Name(HostStep step) {
  switch (step) {
    case HostStep::kNone: return "";
    case HostStep::kInside: return "inside";
    case HostStep::kAcross: return "across";
    case HostStep::kVerdict: return "verdict";
    case HostStep::kDown: return "down";
    case HostStep::kOrphans: return "orphans";
  }
  return "unknown";
}

const char* Name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "Sum";
    case ReduceOp::kAverage: return "Average";
    case ReduceOp::kMin: return "Min";
    case ReduceOp::kMax: return "Max";
    case ReduceOp::kProduct: return "Product";
    case ReduceOp::kAdasum: return "Adasum";
  }
  return "unknown";
}

}  // namespace dad
