// The tensors that all ranks know by number. Every rank makes the same changes in the same order,
// so numbers agree without being sent. Worker only.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "wire/negotiation.h"

namespace dad {

struct CacheEntry {
  RequestMeta meta;
  uint64_t phase_key = 0;  // entries with equal keys were in flight together on every rank
  uint64_t order = 0;      // the order in which it was first agreed on
  // How often it was agreed on since the end of the last schedule.
  int times = 0;
  // How often in a row it has delayed its batch. The first time may be an accident.
  int strikes = 0;
  bool scheduled = false;
  bool used = false;

  bool loner() const { return strikes >= 2; }  // travels alone
};

class TensorCache {
 public:
  explicit TensorCache(size_t capacity) : capacity_(capacity) {}

  std::optional<uint32_t> Find(const RequestKey& key) const;
  // Null for a number that is not in use.
  const CacheEntry* Get(uint32_t id) const;
  CacheEntry* Get(uint32_t id);

  // Records that the tensor was agreed on. Returns how often that has happened since there was a
  // schedule.
  int Note(const RequestMeta& meta, uint64_t phase_key);
  void Remove(const RequestKey& key);

  uint32_t end_id() const { return static_cast<uint32_t>(entries_.size()); }

 private:
  std::optional<uint32_t> FreeSlot();

  const size_t capacity_;
  uint64_t next_order_ = 0;
  std::vector<CacheEntry> entries_;
  std::unordered_map<RequestKey, uint32_t, HashOfKey> ids_;
};

}  // namespace dad
