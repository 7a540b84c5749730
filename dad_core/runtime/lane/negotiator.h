// What is ready on all ranks, in one agreed order. A pure function of the messages so far: every
// rank holds the same table and reaches the same decision. Worker only.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/lane/tensor_cache.h"
#include "wire/negotiation.h"

namespace dad {

struct Decision {
  struct Ready {
    RequestMeta meta;  // first dimensions are those of the lowest rank that has it
    uint64_t phase_key = 0;
    std::vector<bool> absent;  // members that have joined and do not have it; empty: none
    std::vector<int> last;     // members whose messages of this round made it ready
  };
  struct Failed {
    RequestKey key;
    std::string message;
  };
  std::vector<Ready> ready;  // in the agreed order
  std::vector<Failed> failed;
  int last_joined = -1;  // member index, when all have joined
};

class Negotiator {
 public:
  // `members`: global ranks of the process set, used in messages to users.
  // `join_strict`: only reductions and barriers may run while some rank has joined.
  Negotiator(std::vector<int> members, const TensorCache* cache, bool join_strict = false);

  // One message from each member. InvalidArgument if one refers to an unknown tensor: then the
  // ranks are out of step, which is a bug.
  Result<Decision> Decide(std::span<const NegotiationMessage> messages);

  bool any_joined() const;

  // Drops waiting requests that satisfy `drop`, because they are exchanged another way.
  void Drop(const std::function<bool(const RequestKey& key)>& drop);

  // Waiting requests, with the global ranks that they wait for.
  std::vector<std::pair<RequestKey, std::vector<int>>> Waiting() const;
  // Whether a member has announced the request, which waits for others.
  bool Waits(int member, const RequestKey& key) const;

 private:
  struct Entry {
    RequestKey key;
    std::vector<std::optional<RequestMeta>> metas;  // by member
    std::vector<uint32_t> phases;
    std::vector<uint64_t> rounds;  // the rounds in which each member announced it
  };
  void Add(int member, const RequestMeta& meta, uint32_t phase);
  void Withdraw(int member, const RequestKey& key);
  bool IsReady(const Entry& entry) const;
  void FailDifferentKinds(Decision& decision);
  std::optional<std::list<Entry>::iterator> Find(const RequestKey& key) const;
  std::list<Entry>::iterator Erase(std::list<Entry>::iterator entry);
  void Conclude(const Entry& entry, Decision& decision) const;

  const std::vector<int> members_;
  const TensorCache* const cache_;
  const bool join_strict_;
  uint64_t round_ = 0;
  std::vector<bool> joined_;
  int last_joined_ = -1;
  std::list<Entry> table_;  // in the order in which names were first seen
  // The requests of one tensor: usually one, of one kind.
  std::unordered_map<TensorKey, std::vector<std::list<Entry>::iterator>, HashOfKey> by_tensor_;
  std::set<TensorKey> of_many_kinds_;  // tensors that have, or had, several
};

}  // namespace dad
