// How the control connection announces a message. Its header keeps all its fields; two bits of the
// kind are ours. A payload that comes by MPI is announced by its tag and the lengths of its parts,
// each of which is one MPI message.
#pragma once

#include <cstdint>
#include <vector>

#include "dad/status.h"
#include "util/gather_buffer.h"
#include "wire/message.h"

namespace dad::mpi_transport {

// Smaller payloads travel with their header: a second message would cost more than
// MPI gains.
inline constexpr size_t kSmallestByMpi = 64 * 1024;

// On every message: hides its kind from the control transport, which would otherwise keep
// collectives and goodbyes for itself.
inline constexpr uint8_t kCarriedBit = 0x40;
inline constexpr uint8_t kByMpiBit = 0x80;

inline MessageHeader Marked(MessageHeader header, uint8_t bits) {
  header.kind = static_cast<MessageKind>(static_cast<uint8_t>(header.kind) | bits);
  return header;
}

inline MessageHeader Unmarked(MessageHeader header) {
  header.kind =
      static_cast<MessageKind>(static_cast<uint8_t>(header.kind) & ~(kCarriedBit | kByMpiBit));
  return header;
}

inline bool ComesByMpi(const MessageHeader& header) {
  return (static_cast<uint8_t>(header.kind) & kByMpiBit) != 0;
}

struct Announcement {
  int32_t tag = 0;
  std::vector<uint64_t> part_bytes;

  uint64_t total_bytes() const;
};

GatherBuffer Encode(const Announcement& announcement);
Result<Announcement> DecodeAnnouncement(ByteSpan bytes);

}  // namespace dad::mpi_transport
