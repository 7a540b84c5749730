// The frame of every message between two ranks: a fixed header, then a payload whose layout depends
// on the kind. Little-endian. docs/wire_format.md has the bytes.
#pragma once

#include <cstdint>

namespace dad {

inline constexpr uint32_t kWireMagic = 0x02444144;  // "DAD" and the version of the format

enum class MessageKind : uint8_t {
  kCollective = 1,  // a blocking collective of the transport itself; batch is its tag
  kNegotiate,       // readiness; batch is the sequence number of the negotiation
  kData,            // a round of a batch
  kPing,
  kPong,
  kAbort,    // the sender gives up; payload: culprit rank (int32) and the reason
  kGoodbye,  // the sender has shut down
  kLeft,     // the sender leaves a batch that cannot finish; payload: the reason
  kAsk,      // what are you doing? batch is the number of the question
  kState,    // the answer; batch is that number (snapshot.h)
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

// The bits of a kind that are its own; the others say how a message travels (mpi/announcement.h).
inline constexpr uint8_t kKindBits = 0x3f;

inline MessageKind KindOf(const MessageHeader& header) {
  return static_cast<MessageKind>(static_cast<uint8_t>(header.kind) & kKindBits);
}

// On a connection the payload of a longer message is cut into parts, and other messages may go
// between them.
inline constexpr uint64_t kLongestWhole = 16 * 1024;

// Control messages do not wait behind other messages, not even behind one that is half sent.
// Control messages keep their order among themselves, and so do all others; a control message
// arrives before everything that was sent after it. Lanes rely on no more than that. kLeft and
// kGoodbye are not control, because they announce what will not follow the data before them.
inline bool IsControl(const MessageHeader& header) {
  // A message that announces a payload on another road keeps its place among the others.
  const bool announces = (static_cast<uint8_t>(header.kind) & 0x80) != 0;
  if (announces || header.payload_bytes > kLongestWhole) return false;
  switch (KindOf(header)) {
    case MessageKind::kNegotiate:
    case MessageKind::kPing:
    case MessageKind::kPong:
    case MessageKind::kAbort:
    case MessageKind::kAsk:
    case MessageKind::kState: return true;
    default: return false;
  }
}

}  // namespace dad
