#include "torch_ops/capture/registry.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <unordered_map>

#include "torch_ops/capture/rows.h"

namespace dad_torch {

namespace {

// Never destroyed: at exit the tensors in it would need an interpreter that is gone.
struct Registry {
  std::mutex mutex;
  // The weak reference in an entry keeps the address from being used again.
  std::unordered_map<const c10::TensorImpl*, EntryPtr> entries;
  // Compiled graphs may outlive the tracking: an entry stays here as long as its parameter lives.
  std::unordered_map<int, EntryPtr> by_id;
  int next_id = 0;
  uint64_t next_serial = 0;
  std::atomic<int> active{0};  // entries that are not off
  std::atomic<uint64_t> next_op{0};
  std::atomic<uint64_t> batch{0};
  std::atomic<bool> batch_is_over{false};
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

EntryPtr FindLocked(Registry& registry, const c10::TensorImpl* param) {
  auto found = registry.entries.find(param);
  return found == registry.entries.end() ? nullptr : found->second;
}

EntryPtr Tracked(Registry& registry, const at::Tensor& param) {
  auto entry = FindLocked(registry, param.unsafeGetTensorImpl());
  TORCH_CHECK_VALUE(entry != nullptr, "this tensor is not tracked");
  return entry;
}

void SetModeLocked(Registry& registry, Entry& entry, CaptureMode mode) {
  const CaptureMode before = entry.mode.exchange(mode);
  registry.active +=
      static_cast<int>(mode != CaptureMode::kOff) - static_cast<int>(before != CaptureMode::kOff);
}

// What is dropped here is destroyed by the caller, after the lock.
void StartStep(Entry& entry, std::vector<KeptSegment>& dropped) {
  std::move(entry.segments.begin(), entry.segments.end(), std::back_inserter(dropped));
  entry.segments.clear();
  entry.captured = false;
  entry.declined.clear();
  entry.earliest_op = std::numeric_limits<uint64_t>::max();
  entry.samples = -1;
}

void ForgetDeadLocked(Registry& registry, std::vector<KeptSegment>& dropped) {
  std::erase_if(registry.entries, [&](const auto& item) {
    Entry& entry = *item.second;
    if (!entry.param.expired()) return false;
    SetModeLocked(registry, entry, CaptureMode::kOff);
    StartStep(entry, dropped);
    return true;
  });
  std::erase_if(registry.by_id, [](const auto& item) { return item.second->param.expired(); });
}

std::array<int64_t, 3> VersionsOf(const Segment& segment) {
  const auto version = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor._version() : 0;
  };
  return {version(segment.a), version(segment.d), version(segment.x)};
}

}  // namespace

Entry::Entry(int the_id, const at::Tensor& the_param)
    : id(the_id), param(the_param.getIntrusivePtr()) {}

bool CaptureIdle() { return TheRegistry().active.load(std::memory_order_relaxed) == 0; }

EntryPtr FindEntry(const c10::TensorImpl* param) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  return FindLocked(registry, param);
}

EntryPtr FindEntry(int id) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  auto found = registry.by_id.find(id);
  return found == registry.by_id.end() ? nullptr : found->second;
}

uint64_t NextOpNumber() { return TheRegistry().next_op++; }

Batch CurrentBatch(int64_t leading, bool in_backward) {
  thread_local Batch current;
  if (in_backward || leading < 0) return current;
  Registry& registry = TheRegistry();
  if (registry.batch_is_over.exchange(false)) ++registry.batch;
  const uint64_t number = registry.batch;
  if (current.samples < 0 || current.number != number) current = {number, leading};
  return current;
}

Place Keep(Entry& entry, Segment segment, uint64_t op_number) {
  KeptSegment kept;
  kept.versions = VersionsOf(segment);
  kept.made = MadeOnCurrentStream((segment.d.defined() ? segment.d : segment.x).device());
  kept.segment = std::move(segment);
  Registry& registry = TheRegistry();
  registry.batch_is_over = true;
  std::lock_guard lock(registry.mutex);
  kept.segment.serial = registry.next_serial++;
  const Place place{kept.segment.serial, static_cast<int64_t>(entry.segments.size())};
  entry.captured = true;
  if (op_number < entry.earliest_op) {
    entry.earliest_op = op_number;
    entry.samples = kept.segment.samples;
  }
  entry.segments.push_back(std::move(kept));
  return place;
}

void Decline(Entry& entry, const char* reason) {
  std::lock_guard lock(TheRegistry().mutex);
  if (entry.declined.empty()) entry.declined = reason;
}

bool Pair(const EntryPtr& weight, const EntryPtr& bias) {
  std::lock_guard lock(TheRegistry().mutex);
  const auto decline = [&](const char* reason) {
    if (bias->declined.empty()) bias->declined = reason;
    return false;
  };
  // Its gradient would go to the owner of the weight, and the owner of the bias would have none.
  if (weight->owner != bias->owner) return decline("another optimizer has its weight");
  if (bias->alone) return decline("it is the parameter of a norm layer, too");
  const EntryPtr weight_of_bias = bias->weight.lock();
  const EntryPtr bias_of_weight = weight->bias.lock();
  if (!weight_of_bias && !bias_of_weight) {
    weight->bias = bias;
    bias->weight = weight;
    return true;
  }
  if (weight_of_bias == weight && bias_of_weight == bias) return true;
  return decline("it is used with more than one weight");
}

bool StandAlone(Entry& entry) {
  std::lock_guard lock(TheRegistry().mutex);
  if (!entry.weight.expired()) {
    if (entry.declined.empty()) entry.declined = "it rides with a weight elsewhere";
    return false;
  }
  entry.alone = true;
  return true;
}

int TrackParameter(const at::Tensor& param, CaptureMode mode, int owner) {
  TORCH_CHECK_VALUE(param.defined() && param.is_leaf() && at::isFloatingType(param.scalar_type()),
                    "only a floating point leaf can be tracked");
  std::vector<KeptSegment> dropped;
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  EntryPtr entry = FindLocked(registry, param.unsafeGetTensorImpl());
  if (!entry) {
    ForgetDeadLocked(registry, dropped);
    entry = std::make_shared<Entry>(registry.next_id++, param);
    registry.entries.emplace(param.unsafeGetTensorImpl(), entry);
    registry.by_id.emplace(entry->id, entry);
  }
  entry->owner = owner;
  SetModeLocked(registry, *entry, mode);
  return entry->id;
}

void SetCaptureMode(const at::Tensor& param, CaptureMode mode) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  SetModeLocked(registry, *Tracked(registry, param), mode);
}

bool UntrackParameter(const at::Tensor& param, int owner) {
  std::vector<KeptSegment> dropped;
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  EntryPtr entry = FindLocked(registry, param.unsafeGetTensorImpl());
  if (!entry || entry->owner != owner) return false;
  SetModeLocked(registry, *entry, CaptureMode::kOff);
  StartStep(*entry, dropped);
  if (EntryPtr bias = entry->bias.lock()) bias->weight.reset();
  if (EntryPtr weight = entry->weight.lock()) weight->bias.reset();
  registry.entries.erase(param.unsafeGetTensorImpl());
  return true;
}

void FoldBias(const at::Tensor& weight, const at::Tensor& bias) {
  Registry& registry = TheRegistry();
  EntryPtr weight_entry;
  EntryPtr bias_entry;
  {
    std::lock_guard lock(registry.mutex);
    weight_entry = Tracked(registry, weight);
    bias_entry = Tracked(registry, bias);
  }
  TORCH_CHECK_VALUE(bias.dim() == 1 && weight.dim() >= 2 && bias.size(0) == weight.size(0),
                    "a bias has one element for each row of its weight");
  TORCH_CHECK_VALUE(Pair(weight_entry, bias_entry), "the weight or the bias has another partner");
}

at::Tensor FoldedBias(const at::Tensor& weight) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  const EntryPtr bias = Tracked(registry, weight)->bias.lock();
  if (!bias) return {};
  auto impl = bias->param.lock();
  return impl ? at::Tensor(std::move(impl)) : at::Tensor();
}

std::vector<Segment> TakeSegments(const at::Tensor& param) {
  std::vector<KeptSegment> kept;
  bool by_sample = false;
  Registry& registry = TheRegistry();
  {
    std::lock_guard lock(registry.mutex);
    const EntryPtr entry = Tracked(registry, param);
    by_sample = entry->mode == CaptureMode::kSamples;
    kept.swap(entry->segments);
  }
  std::vector<Segment> segments;
  segments.reserve(kept.size());
  for (KeptSegment& item : kept) {
    TORCH_CHECK(VersionsOf(item.segment) == item.versions,
                "an input or a gradient of a captured layer was changed in place between "
                "backward() and step(); its rows were needed to form the gradient");
    Segment& segment = item.segment;
    if (item.made) UseOnCurrentStream(*item.made, {segment.a, segment.d, segment.index, segment.x});
    segments.push_back(std::move(segment));
  }
  return by_sample ? MergeUses(std::move(segments)) : segments;
}

size_t CountSegments(const at::Tensor& param) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  return Tracked(registry, param)->segments.size();
}

std::string CaptureReason(const at::Tensor& param) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  const EntryPtr entry = Tracked(registry, param);
  if (!entry->declined.empty()) return entry->declined;
  if (entry->captured) return "";
  if (const EntryPtr weight = entry->weight.lock(); weight && weight->captured) return "";
  return "its gradient came from an op without factors";
}

int64_t CaptureSamples(at::TensorList params) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  uint64_t earliest = std::numeric_limits<uint64_t>::max();
  int64_t samples = -1;
  for (const at::Tensor& param : params) {
    const EntryPtr entry = FindLocked(registry, param.unsafeGetTensorImpl());
    if (entry && entry->earliest_op < earliest) {
      earliest = entry->earliest_op;
      samples = entry->samples;
    }
  }
  return samples;
}

void BeginCaptureStep(at::TensorList params) {
  std::vector<KeptSegment> dropped;
  Registry& registry = TheRegistry();
  registry.batch_is_over = true;
  std::lock_guard lock(registry.mutex);
  for (const at::Tensor& param : params) {
    if (const EntryPtr entry = FindLocked(registry, param.unsafeGetTensorImpl())) {
      StartStep(*entry, dropped);
    }
  }
}

}  // namespace dad_torch
