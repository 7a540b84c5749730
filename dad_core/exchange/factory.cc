#include <string>

#include "exchange/adasum.h"
#include "exchange/all_to_all.h"
#include "exchange/barrier.h"
#include "exchange/broadcast.h"
#include "exchange/dense.h"
#include "exchange/dense_ring.h"
#include "exchange/device/bench.h"
#include "exchange/device/factor.h"
#include "exchange/device/int8.h"
#include "exchange/device/low_rank.h"
#include "exchange/device/qsgd.h"
#include "exchange/device/sparse.h"
#include "exchange/device/transfer.h"
#include "exchange/exchange.h"
#include "exchange/factor.h"
#include "exchange/gather.h"
#include "exchange/int8.h"
#include "exchange/low_rank.h"
#include "exchange/method.h"
#include "exchange/order.h"
#include "exchange/qsgd.h"
#include "exchange/reduce_scatter.h"
#include "exchange/sparse.h"

namespace dad {
namespace {

Status Refuse(const TensorSpec& spec, const std::string& why) {
  return Status::InvalidArgument("\"" + spec.name + "\": " + why);
}

Result<std::unique_ptr<Exchange>> MakeAllReduce(const TensorSpec& spec, Slice slice,
                                                int64_t batch_bytes, const ExchangeEnv& env) {
  if (spec.op != ReduceOp::kAdasum) {
    // By the size of the whole tensor: all of its slices go the same way.
    const bool large = env.ring_bytes > 0 && ExpectedBytes(spec) >= env.ring_bytes;
    if (large && CanGoRound(spec)) return MakeDenseRingExchange(spec, slice, env.pack);
    const DenseForm form = batch_bytes <= env.direct_bytes ? DenseForm::kDirect : DenseForm::kOwner;
    return MakeDenseExchange(spec, slice, form, env.pack);
  }
  if (!IsFloating(spec.dtype)) {
    return Refuse(spec, std::string("Adasum needs a floating type, not ") + Name(spec.dtype));
  }
  return MakeAdasumExchange(spec);
}

Result<std::unique_ptr<Exchange>> MakeByMethod(const TensorSpec& spec, const ExchangeEnv& env) {
  const Result<MethodText> method = MethodText::Parse(spec.method);
  if (!method.ok()) return method.status();
  const std::string& name = method.value().name();
  if (spec.kind != OpKind::kAllReduce) {
    return Refuse(spec, "method \"" + name + "\" is for allreduce only");
  }
  if (ComputesOnDevice(spec, env)) {
    if (name == "sparse") return MakeDeviceSparseExchange(spec, method.value(), env);
    if (name == "int8") return MakeDeviceInt8Exchange(spec, method.value(), env);
    if (name == "qsgd") return MakeDeviceQsgdExchange(spec, method.value(), env);
    if (name == "factor") return MakeDeviceFactorExchange(spec, method.value(), env);
    if (name == "low_rank") return MakeDeviceLowRankExchange(spec, method.value(), env);
  }
  if (name == "factor") return MakeFactorExchange(spec, method.value(), env);
  if (name == "low_rank") return MakeLowRankExchange(spec, method.value(), env);
  if (name == "int8") return MakeInt8Exchange(spec, method.value(), env);
  if (name == "sparse") return MakeSparseExchange(spec, method.value(), env);
  if (name == "qsgd") return MakeQsgdExchange(spec, method.value(), env);
  return Refuse(spec, "unknown method \"" + spec.method + "\"");
}

}  // namespace

bool ComputesOnDevice(const TensorSpec& spec, const ExchangeEnv& env) {
  if (env.bench == nullptr || spec.device != DeviceType::kCuda || spec.on_device ||
      spec.kind != OpKind::kAllReduce) {
    return false;
  }
  const Result<MethodText> method = MethodText::Parse(spec.method);
  if (!method.ok()) return false;
  const std::string& name = method.value().name();
  return name == "int8" || name == "qsgd" || (name == "sparse" && SparseOnDevice(method.value())) ||
         FactorOnDevice(spec, method.value(), env) || LowRankOnDevice(spec, method.value(), env);
}

bool TakesFromDevice(const TensorSpec& spec, const Contribution& mine, const ExchangeEnv& env) {
  if (!ComputesOnDevice(spec, env) || mine.input.device_index != env.bench->device()) return false;
  if (spec.method.starts_with("factor") || spec.method.starts_with("low_rank")) return true;
  if (spec.method.starts_with("sparse")) return SparseTakesFromDevice(spec, mine, env);
  // One tensor in, one out.
  return spec.dtype == DType::kFloat64 ? IsNear<double>(mine.input) && IsNear<double>(mine.output)
                                       : IsNear<float>(mine.input) && IsNear<float>(mine.output);
}

bool IsElementwise(const TensorSpec& spec) {
  return !spec.on_device && spec.kind == OpKind::kAllReduce && spec.op != ReduceOp::kAdasum &&
         spec.method == "none";
}

int64_t ExpectedBytes(const TensorSpec& spec) {
  const int64_t dense = NumElements(spec.shape) * static_cast<int64_t>(SizeOf(spec.dtype));
  if (spec.method == "none") return dense;
  const Result<MethodText> method = MethodText::Parse(spec.method);
  if (!method.ok()) return dense;
  const std::string& name = method.value().name();
  if (name == "low_rank") return LowRankBytes(method.value(), spec.dtype);
  if (name == "int8") return NumElements(spec.shape);
  if (name == "sparse") return SparseShareBytes(spec, method.value());
  if (name == "qsgd") {
    const auto bits = method.value().Integer("bits", 4);
    if (bits.ok()) return QsgdShareBytes(NumElements(spec.shape), static_cast<int>(bits.value()));
  }
  if (name == "factor") return FactorBytes(method.value(), spec.dtype);
  return dense;
}

Result<std::unique_ptr<Exchange>> MakeExchange(const TensorSpec& spec, Slice slice,
                                               int64_t batch_bytes, const ExchangeEnv& env) {
  if (spec.on_device) return MakeOrderExchange(spec, env);
  if (spec.method != "none") return MakeByMethod(spec, env);
  switch (spec.kind) {
    case OpKind::kAllReduce: return MakeAllReduce(spec, slice, batch_bytes, env);
    case OpKind::kAllGather: return MakeGatherExchange(spec);
    case OpKind::kBroadcast: return MakeBroadcastExchange(spec);
    case OpKind::kAllToAll: return MakeAllToAllExchange(spec);
    case OpKind::kReduceScatter:
      if (spec.shape.empty()) return Refuse(spec, "reducescatter needs a first dimension to split");
      if (spec.op == ReduceOp::kAdasum) return Refuse(spec, "reducescatter cannot do Adasum");
      return MakeReduceScatterExchange(spec);
    case OpKind::kBarrier: return MakeBarrierExchange(spec);
    case OpKind::kJoin:
    case OpKind::kAddProcessSet:
    case OpKind::kRemoveProcessSet: break;
  }
  return Refuse(spec, std::string(Name(spec.kind)) + " exchanges no tensor");
}

}  // namespace dad
