#include "runtime/lane/negotiator.h"

#include <algorithm>
#include <utility>

#include "util/hash.h"

namespace dad {
namespace {

// Collectives that Horovod rejects while some rank has joined.
bool NeedsEveryRank(OpKind kind) {
  return kind == OpKind::kAllGather || kind == OpKind::kBroadcast || kind == OpKind::kAllToAll ||
         kind == OpKind::kReduceScatter;
}

}  // namespace

Negotiator::Negotiator(std::vector<int> members, const TensorCache* cache, bool join_strict)
    : members_(std::move(members)),
      cache_(cache),
      join_strict_(join_strict),
      joined_(members_.size(), false) {}

bool Negotiator::any_joined() const {
  return std::find(joined_.begin(), joined_.end(), true) != joined_.end();
}

Result<Decision> Negotiator::Decide(std::span<const NegotiationMessage> messages) {
  ++round_;
  uint32_t joins = 0;
  for (const NegotiationMessage& message : messages) joins = std::max(joins, message.joins);
  for (size_t member = 0; member < messages.size(); ++member) {
    const NegotiationMessage& message = messages[member];
    for (const RequestKey& key : message.withdrawn) Withdraw(static_cast<int>(member), key);
    // The set of all ranks learns the end of a join. In another set, a member may have learned it
    // and continued before a member that spoke as joined.
    const bool joined = message.joined && message.joins == joins;
    if (joined && !joined_[member]) last_joined_ = static_cast<int>(member);
    joined_[member] = joined;
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
    entry = Erase(entry);
  }
  FailDifferentKinds(decision);
  // A request that a rank had open in another set when it joined is completed with the zeros of the
  // ranks that have joined, so these must not continue before.
  const bool pending = std::any_of(messages.begin(), messages.end(),
                                   [](const NegotiationMessage& one) { return one.pending; });
  if (!pending && std::find(joined_.begin(), joined_.end(), false) == joined_.end()) {
    decision.last_joined = last_joined_;
    std::fill(joined_.begin(), joined_.end(), false);
  }
  return decision;
}

std::optional<std::list<Negotiator::Entry>::iterator> Negotiator::Find(
    const RequestKey& key) const {
  const auto found = by_tensor_.find(key.tensor());
  if (found == by_tensor_.end()) return std::nullopt;
  for (const auto& entry : found->second) {
    if (entry->key.kind == key.kind) return entry;
  }
  return std::nullopt;
}

void Negotiator::Add(int member, const RequestMeta& meta, uint32_t phase) {
  auto found = Find(KeyOf(meta));
  if (!found.has_value()) {
    table_.push_back({KeyOf(meta), std::vector<std::optional<RequestMeta>>(members_.size()),
                      std::vector<uint32_t>(members_.size()),
                      std::vector<uint64_t>(members_.size())});
    found = std::prev(table_.end());
    const TensorKey tensor = (*found)->key.tensor();
    auto& of_tensor = by_tensor_[tensor];
    of_tensor.push_back(*found);
    if (of_tensor.size() > 1) of_many_kinds_.insert(tensor);
  }
  (*found)->metas[static_cast<size_t>(member)] = meta;
  (*found)->phases[static_cast<size_t>(member)] = phase;
  (*found)->rounds[static_cast<size_t>(member)] = round_;
}

void Negotiator::Withdraw(int member, const RequestKey& key) {
  const auto found = Find(key);
  if (!found.has_value()) return;
  auto& metas = (*found)->metas;
  metas[static_cast<size_t>(member)].reset();
  const bool any =
      std::any_of(metas.begin(), metas.end(), [](const auto& meta) { return meta.has_value(); });
  if (!any) Erase(*found);
}

std::list<Negotiator::Entry>::iterator Negotiator::Erase(std::list<Entry>::iterator entry) {
  const auto found = by_tensor_.find(entry->key.tensor());
  std::erase(found->second, entry);
  if (found->second.empty()) by_tensor_.erase(found);
  return table_.erase(entry);
}

bool Negotiator::IsReady(const Entry& entry) const {
  for (size_t member = 0; member < members_.size(); ++member) {
    if (!entry.metas[member].has_value() && !joined_[member]) return false;
  }
  return true;
}

// All ranks have the tensor, but in kinds that differ: they mean the same tensor and would wait for
// ever. Ranks that have two kinds of one tensor in flight in the same order never get here.
void Negotiator::FailDifferentKinds(Decision& decision) {
  for (const TensorKey& tensor : std::exchange(of_many_kinds_, {})) {
    const auto found = by_tensor_.find(tensor);
    if (found == by_tensor_.end() || found->second.size() < 2) continue;
    const auto entries = found->second;
    // Ranks that plan for a tensor first meet at a barrier of its name that compares their
    // compression. To a user the difference is the compression, not the barrier.
    const bool plans = std::any_of(entries.begin(), entries.end(), [](const auto& entry) {
      const auto& metas = entry->metas;
      return std::any_of(metas.begin(), metas.end(), [](const auto& meta) {
        return meta.has_value() && meta->kind == OpKind::kBarrier && !meta->terms.empty();
      });
    });
    std::string values;
    bool all = true;
    for (size_t member = 0; member < members_.size(); ++member) {
      const auto mine = std::find_if(entries.begin(), entries.end(), [&](const auto& entry) {
        return entry->metas[member].has_value();
      });
      if (mine != entries.end()) {
        const RequestMeta& meta = *(*mine)->metas[member];
        const std::string compression =
            meta.kind == OpKind::kBarrier ? meta.terms : meta.method.text();
        values += (values.empty() ? "" : ", ") + (plans ? compression : Name(meta.kind)) +
                  " on rank " + std::to_string(members_[member]);
      } else if (!joined_[member]) {
        all = false;
      }
    }
    if (!all) {
      of_many_kinds_.insert(tensor);
      continue;
    }
    for (const auto& entry : entries) {
      decision.failed.push_back(
          {entry->key, "ranks disagree on \"" + tensor.name + "\": " +
                           (plans ? "compression " + values +
                                        "; all need the same one, with the same warmup_steps"
                                  : "collective " + values)});
      Erase(entry);
    }
  }
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
        {entry.key, "ranks disagree on \"" + entry.key.name + "\": " + what + " " + values});
    return;
  }
  if (base->kind == OpKind::kBroadcast) {
    for (size_t member = 0; member < members_.size(); ++member) {
      if (members_[member] != base->root_rank || !joined_[member]) continue;
      decision.failed.push_back({entry.key, "broadcast \"" + entry.key.name + "\": root rank " +
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
  const auto first_absent = std::find(absent.begin(), absent.end(), true);
  if (first_absent == absent.end()) {
    absent.clear();
  } else if (join_strict_ && NeedsEveryRank(base->kind)) {
    const auto member = static_cast<size_t>(first_absent - absent.begin());
    decision.failed.push_back({entry.key, std::string(Name(base->kind)) + " \"" + entry.key.name +
                                              "\": rank " + std::to_string(members_[member]) +
                                              " has joined, and with HOROVOD_JOIN_STRICT=1 only "
                                              "allreduce works until all ranks have joined"});
    return;
  }
  std::vector<int> last;
  for (size_t member = 0; member < members_.size(); ++member) {
    if (entry.rounds[member] == round_) last.push_back(static_cast<int>(member));
  }
  decision.ready.push_back({*base, phase_key, std::move(absent), std::move(last)});
}

void Negotiator::Drop(const std::function<bool(const RequestKey& key)>& drop) {
  for (auto entry = table_.begin(); entry != table_.end();) {
    entry = drop(entry->key) ? Erase(entry) : std::next(entry);
  }
}

bool Negotiator::Waits(int member, const RequestKey& key) const {
  const auto found = Find(key);
  return found.has_value() && (*found)->metas[static_cast<size_t>(member)].has_value();
}

std::vector<std::pair<RequestKey, std::vector<int>>> Negotiator::Waiting() const {
  std::vector<std::pair<RequestKey, std::vector<int>>> waiting;
  for (const Entry& entry : table_) {
    std::vector<int> missing;
    for (size_t member = 0; member < members_.size(); ++member) {
      if (!entry.metas[member].has_value() && !joined_[member]) {
        missing.push_back(members_[member]);
      }
    }
    waiting.emplace_back(entry.key, std::move(missing));
  }
  return waiting;
}

}  // namespace dad
