#include <algorithm>
#include <string>

#include "exchange/collective/adasum.h"
#include "exchange/collective/all_to_all.h"
#include "exchange/collective/barrier.h"
#include "exchange/collective/broadcast.h"
#include "exchange/collective/dense.h"
#include "exchange/collective/dense_ring.h"
#include "exchange/collective/gather.h"
#include "exchange/collective/order.h"
#include "exchange/collective/reduce_scatter.h"
#include "exchange/device/bench.h"
#include "exchange/device/transfer.h"
#include "exchange/exchange.h"
#include "exchange/method_table.h"

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
  const Result<const MethodRow*> row = RowOf(spec.method);
  if (!row.ok()) return Refuse(spec, row.status().message());
  if (spec.kind != OpKind::kAllReduce) {
    return Refuse(spec, "method \"" + spec.method.name() + "\" is for allreduce only");
  }
  return ComputesOnDevice(spec, env) ? row.value()->device.make(spec, env)
                                     : row.value()->make(spec, env);
}

// How the spec's method is computed on a device; null: it is not, or there is none.
const DeviceMethod* OnDevice(const TensorSpec& spec, const ExchangeEnv& env) {
  if (env.bench == nullptr || spec.device != DeviceType::kCuda || spec.on_device ||
      spec.kind != OpKind::kAllReduce || spec.method.none()) {
    return nullptr;
  }
  const Result<const MethodRow*> row = RowOf(spec.method);
  if (!row.ok()) return nullptr;
  const DeviceMethod& device = row.value()->device;
  if (device.make == nullptr) return nullptr;
  return device.can_make == nullptr || device.can_make(spec, env) ? &device : nullptr;
}

}  // namespace

bool ComputesOnDevice(const TensorSpec& spec, const ExchangeEnv& env) {
  return OnDevice(spec, env) != nullptr;
}

bool MustComputeOnDevice(const TensorSpec& spec, const ExchangeEnv& env) {
  const DeviceMethod* const device = OnDevice(spec, env);
  return device != nullptr && device->on_all_ranks;
}

bool TakesFromDevice(const TensorSpec& spec, const Contribution& mine, const ExchangeEnv& env) {
  const DeviceMethod* const device = OnDevice(spec, env);
  if (device == nullptr || mine.input.device_index != env.bench->device()) return false;
  if (device->on_all_ranks) return true;
  if (device->takes != nullptr) return device->takes(spec, mine, env);
  return spec.dtype == DType::kFloat64 ? IsNear<double>(mine.input) && IsNear<double>(mine.output)
                                       : IsNear<float>(mine.input) && IsNear<float>(mine.output);
}

bool IsElementwise(const TensorSpec& spec) {
  return !spec.on_device && spec.kind == OpKind::kAllReduce && spec.op != ReduceOp::kAdasum &&
         spec.method.none();
}

int64_t ExpectedBytes(const TensorSpec& spec) {
  const int64_t dense = NumElements(spec.shape) * static_cast<int64_t>(SizeOf(spec.dtype));
  if (spec.method.none()) return dense;
  const Result<const MethodRow*> row = RowOf(spec.method);
  const bool known = row.ok() && row.value()->share_bytes != nullptr;
  return known ? row.value()->share_bytes(spec) : dense;
}

int64_t FusedBytes(const TensorSpec& spec) {
  const int64_t dense = NumElements(spec.shape) * static_cast<int64_t>(SizeOf(spec.dtype));
  const MethodRow* const row = spec.method.none() ? nullptr : FindMethod(spec.method);
  if (row == nullptr) return dense;
  return std::max(ExpectedBytes(spec), dense / row->dense_per_batch);
}

Result<std::unique_ptr<Exchange>> MakeExchange(const TensorSpec& spec, Slice slice,
                                               int64_t batch_bytes, const ExchangeEnv& env) {
  if (spec.on_device) return MakeOrderExchange(spec, env);
  if (!spec.method.none()) return MakeByMethod(spec, env);
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
