#include "transport/mpi/announcement.h"

#include <climits>
#include <cstring>

namespace dad::mpi_transport {

uint64_t Announcement::total_bytes() const {
  uint64_t total = 0;
  for (const uint64_t num_bytes : part_bytes) total += num_bytes;
  return total;
}

GatherBuffer Encode(const Announcement& announcement) {
  GatherBuffer out;
  out.AppendValue(announcement.tag);
  out.Append(std::as_bytes(std::span(announcement.part_bytes)));
  return out;
}

Result<Announcement> DecodeAnnouncement(ByteSpan bytes) {
  Announcement announcement;
  constexpr size_t kTagBytes = sizeof announcement.tag;
  if (bytes.size() < kTagBytes || (bytes.size() - kTagBytes) % sizeof(uint64_t) != 0) {
    return Status::Aborted("malformed announcement of a message");
  }
  std::memcpy(&announcement.tag, bytes.data(), kTagBytes);
  announcement.part_bytes.resize((bytes.size() - kTagBytes) / sizeof(uint64_t));
  if (!announcement.part_bytes.empty()) {
    std::memcpy(announcement.part_bytes.data(), bytes.data() + kTagBytes, bytes.size() - kTagBytes);
  }
  for (const uint64_t num_bytes : announcement.part_bytes) {
    if (num_bytes > INT_MAX) return Status::Aborted("announced a part too long for MPI");
  }
  return announcement;
}

}  // namespace dad::mpi_transport
