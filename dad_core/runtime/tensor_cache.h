// The tensors that all ranks know by number. Every rank makes the same changes in
// the same order, so numbers agree without being sent. Worker only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "wire/negotiation.h"

namespace dad {

struct CacheEntry {
  RequestMeta meta;
  uint64_t phase_key = 0;  // entries with equal keys were in flight together on every rank
  uint64_t order = 0;      // when it was first agreed on
  bool loner = false;      // has held up a batch: travels alone
  bool scheduled = false;
  bool used = false;
};

class TensorCache {
 public:
  explicit TensorCache(size_t capacity) : capacity_(capacity) {}

  std::optional<uint32_t> Find(const std::string& name) const;
  // Null for a number that is not in use.
  const CacheEntry* Get(uint32_t id) const;
  CacheEntry* Get(uint32_t id);

  // Notes that the tensor was agreed on. True if it was there already, as it is now.
  bool Note(const RequestMeta& meta, uint64_t phase_key);
  void Remove(const std::string& name);

  uint32_t end_id() const { return static_cast<uint32_t>(entries_.size()); }

 private:
  std::optional<uint32_t> FreeSlot();

  const size_t capacity_;
  uint64_t next_order_ = 0;
  std::vector<CacheEntry> entries_;
  std::unordered_map<std::string, uint32_t> ids_;
};

}  // namespace dad
