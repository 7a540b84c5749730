// The number of a batch in messages: unique within a lane, and the same on all ranks because it is
// derived from numbers that they agree on.
#pragma once

#include <cstdint>
#include <string>

namespace dad {

inline constexpr uint64_t kScheduledBit = 1ull << 63;
inline constexpr uint32_t kMaxBatchesPerSchedule = 1u << 16;

// The `index`-th batch of what negotiation number `sequence` found ready.
inline uint64_t NegotiatedBatchId(uint64_t sequence, uint32_t index) {
  return ((sequence << 16) | (index & 0xffff)) & ~kScheduledBit;
}

// The `count`-th run of batch `index` of a schedule.
inline uint64_t ScheduledBatchId(uint32_t schedule, uint32_t index, uint32_t count) {
  return kScheduledBit | static_cast<uint64_t>(schedule & 0x7fff) << 48 |
         static_cast<uint64_t>(index & 0xffff) << 32 | count;
}

// For people: "negotiation 7, batch 0" or "schedule 2, batch 0, run 15".
inline std::string BatchName(uint64_t id) {
  const std::string index = std::to_string(id >> ((id & kScheduledBit) != 0 ? 32 : 0) & 0xffff);
  if ((id & kScheduledBit) == 0) {
    return "negotiation " + std::to_string(id >> 16) + ", batch " + index;
  }
  return "schedule " + std::to_string(id >> 48 & 0x7fff) + ", batch " + index + ", run " +
         std::to_string(id & 0xffffffff);
}

// Whether the batch belongs to this schedule or an earlier one. Schedule numbers are truncated and
// wrap around.
inline bool IsOfScheduleUpTo(uint64_t batch, uint32_t schedule) {
  const auto behind = (schedule - static_cast<uint32_t>(batch >> 48)) & 0x7fff;
  return (batch & kScheduledBit) != 0 && behind < 0x4000;
}

}  // namespace dad
