#include "exchange/feedback/state_store.h"

namespace dad {

std::vector<StateTensor> StateStore::Export(const StateKey& key) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return {};
  if (!found->second.state) return found->second.imported;
  std::vector<StateTensor> tensors;
  found->second.state->Export(tensors);
  return tensors;
}

void StateStore::Import(const StateKey& key, std::vector<StateTensor> tensors) {
  MutexLock lock(mutex_);
  entries_[key] = {nullptr, std::move(tensors)};
}

void StateStore::ReturnLast(int process_set, uint32_t stream) {
  MutexLock lock(mutex_);
  for (auto& [key, entry] : entries_) {
    if (key.process_set == process_set && key.stream == stream && entry.state) {
      entry.state->ReturnLast();
    }
  }
}

void StateStore::Drop(int process_set, uint32_t stream) {
  MutexLock lock(mutex_);
  std::erase_if(entries_, [&](const auto& entry) {
    return entry.first.process_set == process_set && entry.first.stream == stream;
  });
}

}  // namespace dad
