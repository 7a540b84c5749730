#include "runtime/lane/tensor_cache.h"

namespace dad {

std::optional<uint32_t> TensorCache::Find(const RequestKey& key) const {
  auto found = ids_.find(key);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

const CacheEntry* TensorCache::Get(uint32_t id) const {
  return id < entries_.size() && entries_[id].used ? &entries_[id] : nullptr;
}

CacheEntry* TensorCache::Get(uint32_t id) {
  return id < entries_.size() && entries_[id].used ? &entries_[id] : nullptr;
}

int TensorCache::Note(const RequestMeta& meta, uint64_t phase_key) {
  if (auto id = Find(KeyOf(meta))) {
    CacheEntry& entry = entries_[*id];
    Difference difference;
    if (!Differ(entry.meta, meta, &difference)) return ++entry.times;
    entry.meta = meta;
    entry.phase_key = phase_key;
    return entry.times = 1;
  }
  const auto slot = FreeSlot();
  if (!slot.has_value()) return 0;
  entries_[*slot] = {.meta = meta,
                     .phase_key = phase_key,
                     .order = next_order_++,
                     .times = 1,
                     .strikes = 0,
                     .scheduled = false,
                     .used = true};
  ids_[KeyOf(meta)] = *slot;
  return 1;
}

void TensorCache::Remove(const RequestKey& key) {
  if (auto id = Find(key)) {
    entries_[*id] = {};
    ids_.erase(key);
  }
}

std::optional<uint32_t> TensorCache::FreeSlot() {
  if (entries_.size() < capacity_) {
    entries_.emplace_back();
    return static_cast<uint32_t>(entries_.size() - 1);
  }
  // Names that never come again (running numbers of unnamed calls) must not displace the others:
  // the oldest name that is in no schedule is removed.
  std::optional<uint32_t> oldest;
  for (uint32_t id = 0; id < entries_.size(); ++id) {
    if (!entries_[id].used) return id;
    if (entries_[id].scheduled) continue;
    if (!oldest.has_value() || entries_[id].order < entries_[*oldest].order) oldest = id;
  }
  if (oldest.has_value()) ids_.erase(KeyOf(entries_[*oldest].meta));
  return oldest;
}

}  // namespace dad
