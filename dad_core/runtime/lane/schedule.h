// Batches that are expected to come again, so that they need no negotiation. Every rank builds them
// from the tensor cache by the same rule. Worker only.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "exchange/exchange.h"
#include "runtime/lane/tensor_cache.h"
#include "runtime/request_state.h"

namespace dad {

struct ScheduledPart {
  uint32_t cache_id = 0;
  int tensor = 0;
  std::shared_ptr<Exchange> exchange;  // kept from run to run
};

struct ScheduledBatch {
  std::vector<ScheduledPart> parts;
  std::vector<uint32_t> members;                                 // distinct cache ids
  std::unordered_map<uint32_t, std::vector<uint32_t>> parts_of;  // of each, by place
  uint64_t signature = 0;
  uint32_t committed = 0;  // runs started
  // The requests of the next run that have arrived so far.
  std::unordered_map<uint32_t, std::shared_ptr<RequestState>> present;
  std::chrono::steady_clock::time_point first_present;
};

class Schedule {
 public:
  // Marks the entries it takes as scheduled.
  static Result<Schedule> Build(uint32_t id, TensorCache& cache, int64_t fusion_bytes,
                                const ExchangeEnv& env, std::span<const int> group_ranks);

  uint32_t id() const { return id_; }
  std::vector<ScheduledBatch>& batches() { return batches_; }
  const std::vector<ScheduledBatch>& batches() const { return batches_; }
  // Batches of which some requests for the next run have arrived, but not all.
  std::set<uint32_t>& incomplete() { return incomplete_; }
  const std::set<uint32_t>& incomplete() const { return incomplete_; }
  // Removes a request from the runs that wait for other requests; returns whether it was there.
  bool Forget(const std::shared_ptr<RequestState>& request);
  // Numbers of the batches that carry the tensor; empty if it is not scheduled.
  std::span<const uint32_t> BatchesOf(uint32_t cache_id) const;

 private:
  uint32_t id_ = 0;
  std::vector<ScheduledBatch> batches_;
  std::set<uint32_t> incomplete_;
  std::unordered_map<uint32_t, std::vector<uint32_t>> batches_of_;
};

// The information that an exchange needs about tensor `index` of a request, and its hash.
TensorSpec SpecOf(const RequestMeta& meta, size_t index, std::span<const int> group_ranks);
uint64_t HashPart(uint64_t hash, const RequestMeta& meta, int tensor, Slice slice);

// The items of a request for the fuser.
struct FuseItem;
void AppendFuseItems(const RequestMeta& meta, int request, uint64_t key, const ExchangeEnv& env,
                     std::vector<FuseItem>& items);

// Whether a request goes from device to device: a function of what all ranks agree on.
bool GoesOnDevice(const RequestMeta& meta, const ExchangeEnv& env);

}  // namespace dad
