#include "runtime/tensor_cache.h"

namespace dad {

std::optional<uint32_t> TensorCache::Find(const std::string& name) const {
  auto found = ids_.find(name);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

const CacheEntry* TensorCache::Get(uint32_t id) const {
  return id < entries_.size() && entries_[id].used ? &entries_[id] : nullptr;
}

CacheEntry* TensorCache::Get(uint32_t id) {
  return id < entries_.size() && entries_[id].used ? &entries_[id] : nullptr;
}

bool TensorCache::Note(const RequestMeta& meta, uint64_t phase_key) {
  if (auto id = Find(meta.name)) {
    CacheEntry& entry = entries_[*id];
    Difference difference;
    if (!Differ(entry.meta, meta, &difference)) return true;
    entry.meta = meta;
    entry.phase_key = phase_key;
    return false;
  }
  const auto slot = FreeSlot();
  if (!slot.has_value()) return false;
  entries_[*slot] = {.meta = meta,
                     .phase_key = phase_key,
                     .order = next_order_++,
                     .loner = false,
                     .scheduled = false,
                     .used = true};
  ids_[meta.name] = *slot;
  return false;
}

void TensorCache::Remove(const std::string& name) {
  if (auto id = Find(name)) {
    entries_[*id] = {};
    ids_.erase(name);
  }
}

std::optional<uint32_t> TensorCache::FreeSlot() {
  if (entries_.size() < capacity_) {
    entries_.emplace_back();
    return static_cast<uint32_t>(entries_.size() - 1);
  }
  // Names that never come again (running numbers of unnamed calls) must not
  // crowd out the others: the oldest that is in no schedule goes.
  std::optional<uint32_t> oldest;
  for (uint32_t id = 0; id < entries_.size(); ++id) {
    if (!entries_[id].used) return id;
    if (entries_[id].scheduled) continue;
    if (!oldest.has_value() || entries_[id].order < entries_[*oldest].order) oldest = id;
  }
  if (oldest.has_value()) ids_.erase(entries_[*oldest].meta.name);
  return oldest;
}

}  // namespace dad
