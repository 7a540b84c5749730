#include "runtime/lane/schedule.h"

#include <algorithm>

#include "runtime/lane/batch_id.h"
#include "runtime/lane/fuser.h"
#include "util/hash.h"

namespace dad {
namespace {

bool NcclAdds(DType dtype) {
  return dtype != DType::kBool && dtype != DType::kInt16 && dtype != DType::kUint16;
}

}  // namespace

TensorSpec SpecOf(const RequestMeta& meta, size_t index, std::span<const int> group_ranks) {
  TensorSpec spec;
  spec.name = meta.name;
  spec.kind = meta.kind;
  spec.op = meta.op;
  spec.prescale = meta.prescale;
  spec.postscale = meta.postscale;
  spec.method = meta.method;
  spec.stream = meta.stream;
  spec.device = meta.device;
  if (!meta.tensors.empty()) {
    spec.dtype = meta.tensors[index].dtype;
    spec.shape = meta.tensors[index].shape;
  }
  const auto root = std::find(group_ranks.begin(), group_ranks.end(), meta.root_rank);
  if (root != group_ranks.end()) spec.root = static_cast<int>(root - group_ranks.begin());
  return spec;
}

bool GoesOnDevice(const RequestMeta& meta, const ExchangeEnv& env) {
  if (!env.device_collectives || meta.device != DeviceType::kCuda || !meta.method.none()) {
    return false;
  }
  switch (meta.kind) {
    case OpKind::kBroadcast:
    case OpKind::kAllGather:
    case OpKind::kAllToAll: return true;  // bytes, whatever their meaning
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter: break;
    default: return false;
  }
  if (meta.op == ReduceOp::kAdasum) return false;
  const bool linear = meta.op == ReduceOp::kSum || meta.op == ReduceOp::kAverage;
  const bool scaled = meta.prescale * meta.postscale != 1.0;
  return std::all_of(meta.tensors.begin(), meta.tensors.end(), [&](const TensorMeta& tensor) {
    const bool floating = IsFloating(tensor.dtype);
    return NcclAdds(tensor.dtype) && (!scaled || (floating && linear)) &&
           (floating || meta.op != ReduceOp::kAverage);
  });
}

uint64_t HashPart(uint64_t hash, const RequestMeta& meta, int tensor, Slice slice) {
  hash = HashCombine(hash, meta.name);
  hash = HashCombine(hash, static_cast<uint64_t>(meta.host_step));
  hash = HashCombine(hash, static_cast<uint64_t>(meta.kind) << 8 | static_cast<uint64_t>(meta.op));
  hash = HashCombine(hash, static_cast<uint64_t>(tensor));
  hash = HashCombine(hash, static_cast<uint64_t>(slice.begin));
  return FirstDimensionVaries(meta.kind) ? hash
                                         : HashCombine(hash, static_cast<uint64_t>(slice.count));
}

void AppendFuseItems(const RequestMeta& meta, int request, uint64_t key, const ExchangeEnv& env,
                     std::vector<FuseItem>& items) {
  const bool on_device = GoesOnDevice(meta, env);
  if (on_device) key = HashCombine(key, uint64_t{1});  // not in one batch with host tensors
  if (meta.tensors.empty()) items.push_back({request, 0, 0, 1, false, key});  // a barrier
  for (size_t i = 0; i < meta.tensors.size(); ++i) {
    const TensorMeta& tensor = meta.tensors[i];
    TensorSpec spec = SpecOf(meta, i, {});
    spec.on_device = on_device;
    // Nor with tensors that a device has to compute first.
    if (ComputesOnDevice(spec, env)) key = HashCombine(key, uint64_t{2});
    FuseItem item{request,
                  static_cast<int>(i),
                  NumElements(tensor.shape),
                  static_cast<int64_t>(SizeOf(tensor.dtype)),
                  IsElementwise(spec),
                  key};
    if (!meta.method.none()) {
      item.elements = FusedBytes(spec);
      item.element_bytes = 1;
    }
    items.push_back(item);
  }
}

Result<Schedule> Schedule::Build(uint32_t id, TensorCache& cache, int64_t fusion_bytes,
                                 const ExchangeEnv& env, std::span<const int> group_ranks) {
  std::vector<uint32_t> ids;
  for (uint32_t i = 0; i < cache.end_id(); ++i) {
    if (cache.Get(i) != nullptr) ids.push_back(i);
  }
  std::sort(ids.begin(), ids.end(),
            [&](uint32_t a, uint32_t b) { return cache.Get(a)->order < cache.Get(b)->order; });

  // One pass per group of tensors that may be fused, in the order of their first.
  std::vector<FuseItem> items;
  std::vector<uint64_t> keys;
  std::unordered_map<uint64_t, std::vector<uint32_t>> by_key;
  for (uint32_t i : ids) {
    const CacheEntry& entry = *cache.Get(i);
    uint64_t key = HashCombine(entry.phase_key, entry.meta.stream);
    if (entry.loner()) {
      key = HashCombine(HashCombine(kHashSeed, entry.meta.name),
                        static_cast<uint64_t>(entry.meta.host_step));
    }
    if (!by_key.contains(key)) keys.push_back(key);
    by_key[key].push_back(i);
  }
  for (uint64_t key : keys) {
    for (uint32_t i : by_key[key]) {
      AppendFuseItems(cache.Get(i)->meta, static_cast<int>(i), key, env, items);
    }
  }

  Schedule schedule;
  schedule.id_ = id;
  std::vector<FusedBatch> fused = Fuse(items, fusion_bytes);
  if (fused.size() > kMaxBatchesPerSchedule) return schedule;  // too much to predict
  for (const FusedBatch& batch : fused) {
    const auto index = static_cast<uint32_t>(schedule.batches_.size());
    ScheduledBatch& scheduled = schedule.batches_.emplace_back();
    scheduled.signature = kHashSeed;
    for (const FusedBatch::Part& part : batch.parts) {
      const auto cache_id = static_cast<uint32_t>(part.request);
      CacheEntry& entry = *cache.Get(cache_id);
      entry.scheduled = true;
      TensorSpec spec = SpecOf(entry.meta, static_cast<size_t>(part.tensor), group_ranks);
      spec.on_device = GoesOnDevice(entry.meta, env);
      Result<std::unique_ptr<Exchange>> exchange = MakeExchange(spec, part.slice, batch.bytes, env);
      if (!exchange.ok()) return exchange.status();
      scheduled.parts.push_back({cache_id, part.tensor, std::move(exchange).value()});
      scheduled.signature = HashPart(scheduled.signature, entry.meta, part.tensor, part.slice);
      std::vector<uint32_t>& places = scheduled.parts_of[cache_id];
      if (places.empty()) {
        scheduled.members.push_back(cache_id);
        schedule.batches_of_[cache_id].push_back(index);
      }
      places.push_back(static_cast<uint32_t>(scheduled.parts.size()) - 1);
    }
  }
  return schedule;
}

bool Schedule::Forget(const std::shared_ptr<RequestState>& request) {
  bool found = false;
  for (uint32_t index = 0; index < batches_.size(); ++index) {
    auto& present = batches_[index].present;
    const auto is_it = [&](const auto& entry) { return entry.second == request; };
    if (std::erase_if(present, is_it) == 0) continue;
    found = true;
    if (present.empty()) incomplete_.erase(index);
  }
  return found;
}

std::span<const uint32_t> Schedule::BatchesOf(uint32_t cache_id) const {
  auto found = batches_of_.find(cache_id);
  if (found == batches_of_.end()) return {};
  return found->second;
}

}  // namespace dad
