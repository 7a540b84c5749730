#include "runtime/negotiator.h"

#include <algorithm>

#include "util/hash.h"

namespace dad {

Negotiator::Negotiator(std::vector<int> members, const TensorCache* cache)
    : members_(std::move(members)), cache_(cache), joined_(members_.size(), false) {}

bool Negotiator::any_joined() const {
  return std::find(joined_.begin(), joined_.end(), true) != joined_.end();
}

Result<Decision> Negotiator::Decide(std::span<const NegotiationMessage> messages) {
  for (size_t member = 0; member < messages.size(); ++member) {
    const NegotiationMessage& message = messages[member];
    if (message.joined && !joined_[member]) last_joined_ = static_cast<int>(member);
    joined_[member] = message.joined;
    for (const auto& known : message.known) {
      const CacheEntry* entry = cache_->Get(known.cache_id);
      if (entry == nullptr) {
        return Status::InvalidArgument("rank " + std::to_string(members_[member]) +
                                       " has tensor number " + std::to_string(known.cache_id) +
                                       " ready, which nobody else knows");
      }
      Add(static_cast<int>(member), entry->meta, known.phase);
    }
    for (const auto& fresh : message.fresh) {
      Add(static_cast<int>(member), fresh.meta, fresh.phase);
    }
  }

  Decision decision;
  for (auto entry = table_.begin(); entry != table_.end();) {
    if (!IsReady(*entry)) {
      ++entry;
      continue;
    }
    Conclude(*entry, decision);
    index_.erase(entry->name);
    entry = table_.erase(entry);
  }
  if (std::find(joined_.begin(), joined_.end(), false) == joined_.end()) {
    decision.last_joined = last_joined_;
    std::fill(joined_.begin(), joined_.end(), false);
  }
  return decision;
}

void Negotiator::Add(int member, const RequestMeta& meta, uint32_t phase) {
  auto found = index_.find(meta.name);
  if (found == index_.end()) {
    table_.push_back({meta.name, std::vector<std::optional<RequestMeta>>(members_.size()),
                      std::vector<uint32_t>(members_.size())});
    found = index_.emplace(meta.name, std::prev(table_.end())).first;
  }
  found->second->metas[static_cast<size_t>(member)] = meta;
  found->second->phases[static_cast<size_t>(member)] = phase;
}

bool Negotiator::IsReady(const Entry& entry) const {
  for (size_t member = 0; member < members_.size(); ++member) {
    if (!entry.metas[member].has_value() && !joined_[member]) return false;
  }
  return true;
}

void Negotiator::Conclude(const Entry& entry, Decision& decision) const {
  const RequestMeta* base = nullptr;
  int base_rank = -1;
  std::string what;
  std::string values;
  for (size_t member = 0; member < members_.size(); ++member) {
    if (!entry.metas[member].has_value()) continue;
    if (base == nullptr) {
      base = &*entry.metas[member];
      base_rank = members_[member];
      continue;
    }
    Difference difference;
    if (!Differ(*base, *entry.metas[member], &difference)) continue;
    if (what.empty()) {
      what = difference.what;
      values = difference.a + " on rank " + std::to_string(base_rank);
    }
    if (difference.what == what) {
      values += ", " + difference.b + " on rank " + std::to_string(members_[member]);
    }
  }
  if (!what.empty()) {
    decision.failed.push_back(
        {entry.name, "ranks disagree on \"" + entry.name + "\": " + what + " " + values});
    return;
  }
  if (base->kind == OpKind::kBroadcast) {
    for (size_t member = 0; member < members_.size(); ++member) {
      if (members_[member] != base->root_rank || !joined_[member]) continue;
      decision.failed.push_back({entry.name, "broadcast \"" + entry.name + "\": root rank " +
                                                 std::to_string(base->root_rank) +
                                                 " has joined and has nothing to send"});
      return;
    }
  }
  uint64_t phase_key = kHashSeed;
  for (uint32_t phase : entry.phases) phase_key = HashCombine(phase_key, phase);
  std::vector<bool> absent(members_.size());
  for (size_t member = 0; member < members_.size(); ++member) {
    absent[member] = !entry.metas[member].has_value();
  }
  if (std::find(absent.begin(), absent.end(), true) == absent.end()) absent.clear();
  decision.ready.push_back({*base, phase_key, std::move(absent)});
}

void Negotiator::Drop(const std::function<bool(const std::string& name)>& drop) {
  for (auto entry = table_.begin(); entry != table_.end();) {
    if (drop(entry->name)) {
      index_.erase(entry->name);
      entry = table_.erase(entry);
    } else {
      ++entry;
    }
  }
}

std::vector<std::pair<std::string, std::vector<int>>> Negotiator::Waiting() const {
  std::vector<std::pair<std::string, std::vector<int>>> waiting;
  for (const Entry& entry : table_) {
    std::vector<int> missing;
    for (size_t member = 0; member < members_.size(); ++member) {
      if (!entry.metas[member].has_value() && !joined_[member]) {
        missing.push_back(members_[member]);
      }
    }
    waiting.emplace_back(entry.name, std::move(missing));
  }
  return waiting;
}

}  // namespace dad
