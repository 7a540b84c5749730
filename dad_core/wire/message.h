// The frame of every message between two ranks: a fixed header, then a payload
// whose layout the kind decides. Little-endian. docs/wire_format.md has the bytes.
#pragma once

#include <cstdint>

namespace dad {

inline constexpr uint32_t kWireMagic = 0x01444144;  // "DAD" and the version of the format

enum class MessageKind : uint8_t {
  kCollective = 1,  // a blocking collective of the transport itself; batch is its tag
  kNegotiate,       // readiness; batch is the sequence number of the negotiation
  kData,            // a round of a batch
  kPing,
  kPong,
  kAbort,    // the sender gives up; payload: culprit rank (int32) and the reason
  kGoodbye,  // the sender has shut down
  kLeft,     // the sender leaves a batch that cannot finish; payload: the reason
};

struct MessageHeader {
  uint32_t magic = kWireMagic;
  MessageKind kind = MessageKind::kData;
  uint8_t round = 0;
  uint16_t lane = 0;  // process set
  uint64_t batch = 0;
  uint64_t signature = 0;  // hash of what the sender believes it is exchanging
  uint64_t payload_bytes = 0;
};
static_assert(sizeof(MessageHeader) == 32);

}  // namespace dad
