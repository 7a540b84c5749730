// wire/message.h as TCP connections carry it: a stream of frames, in pieces of any size, some of
// them cut into parts with others between; and the announcements that go in some of them.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "fuzz.h"
#include "transport/mpi/announcement.h"
#include "transport/tcp/frame_reader.h"

namespace dad::fuzz {
namespace {

struct Message {
  MessageHeader header;
  Bytes payload;
};

// What a reader of docs/wire_format.md makes of the stream: the messages that are complete, and
// whether it ends in one that is refused.
struct Expected {
  std::vector<Message> messages;
  bool refused = false;
  size_t used = 0;  // bytes that a reader may be given
};

// Frames that announce more are cut off: the reader rightly makes room for what a peer of ours
// announces.
constexpr uint64_t kLongest = 1 << 16;

class Understanding {
 public:
  explicit Understanding(ByteSpan stream) : rest_(stream) {}

  Expected Read() {
    while (Frame(/*may_be_long=*/true)) {
    }
    return std::move(expected_);
  }

 private:
  // The next bytes, if they are there.
  std::optional<ByteSpan> Next(size_t length) {
    if (rest_.size() < length) {
      expected_.used += rest_.size();
      rest_ = {};
      return std::nullopt;
    }
    const ByteSpan next = rest_.first(length);
    rest_ = rest_.subspan(length);
    expected_.used += length;
    return next;
  }

  bool Refuse() {
    expected_.refused = true;
    return false;
  }

  // False: nothing follows that could be understood.
  bool Frame(bool may_be_long) {
    const auto header = Next(sizeof(MessageHeader));
    if (!header.has_value()) return false;
    Message message;
    std::memcpy(&message.header, header->data(), sizeof(MessageHeader));
    const uint64_t length = message.header.payload_bytes;
    if (message.header.magic != kWireMagic || length > uint64_t{1} << 38) return Refuse();
    if (length > kLongestWhole && !may_be_long) return Refuse();
    if (length > kLongest) {  // the header stays out, and all that follows
      expected_.used -= sizeof(MessageHeader);
      return false;
    }
    if (length > kLongestWhole) return Parts(std::move(message));
    const auto payload = Next(length);
    if (!payload.has_value()) return false;
    message.payload.assign(payload->begin(), payload->end());
    expected_.messages.push_back(std::move(message));
    return true;
  }

  bool Parts(Message message) {
    while (message.payload.size() < message.header.payload_bytes) {
      const auto marker = Next(sizeof(uint32_t));
      if (!marker.has_value()) return false;
      uint32_t length = 0;
      std::memcpy(&length, marker->data(), sizeof length);
      if (length == 0) {
        if (!Frame(/*may_be_long=*/false)) return false;
        continue;
      }
      if (length > message.header.payload_bytes - message.payload.size()) return Refuse();
      const auto part = Next(length);
      if (!part.has_value()) return false;
      message.payload.insert(message.payload.end(), part->begin(), part->end());
    }
    expected_.messages.push_back(std::move(message));
    return true;
  }

  ByteSpan rest_;
  Expected expected_;
};

class Collector final : public tcp::FrameReader::Listener {
 public:
  explicit Collector(bool in_place) : in_place_(in_place) {}

  std::byte* OnHeader(const MessageHeader& header) override {
    Bytes& place = PlaceFor(header);
    place.assign(header.payload_bytes, std::byte{0});
    return in_place_ ? place.data() : nullptr;
  }
  void OnMessage(const MessageHeader& header, AlignedBuffer payload) override {
    const ByteSpan bytes = payload.size() > 0         ? ByteSpan(payload.span())
                           : header.payload_bytes > 0 ? ByteSpan(PlaceFor(header))
                                                      : ByteSpan();
    messages.push_back({header, {bytes.begin(), bytes.end()}});
  }

  std::vector<Message> messages;

 private:
  // A short message may come while a long one is on its way.
  Bytes& PlaceFor(const MessageHeader& header) {
    return header.payload_bytes > kLongestWhole ? long_place_ : place_;
  }

  const bool in_place_;
  Bytes place_;
  Bytes long_place_;
};

void CheckAnnouncement(const Message& message) {
  const auto announced = mpi_transport::DecodeAnnouncement(message.payload);
  if (!announced.ok()) return;
  Bytes bytes;
  const GatherBuffer encoded = mpi_transport::Encode(announced.value());
  for (const ByteSpan piece : encoded.Pieces()) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
  }
  Require(bytes == message.payload, "an announcement has no round trip");
}

void Run(ByteSpan input) {
  Input choices(input);
  const size_t piece = 1 + choices.Below(100);
  const bool in_place = choices.Below(2) != 0;
  const ByteSpan stream = choices.Rest();
  const Expected expected = Understanding(stream).Read();

  int sockets[2];
  Require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no socket");
  tcp::Traffic traffic;
  Collector collector(in_place);
  tcp::FrameReader reader(&traffic, &collector);
  Status status;
  // Small pieces for the first frames; then as much as a socket takes without blocking.
  for (size_t at = 0; at < expected.used && status.ok();) {
    const size_t most = at < 1000 ? piece : 8192;
    const size_t length = std::min(most, expected.used - at);
    const ssize_t sent = send(sockets[0], stream.data() + at, length, MSG_DONTWAIT);
    Require(sent == static_cast<ssize_t>(length), "a socket that takes nothing");
    at += length;
    status = reader.ReadSome(sockets[1]);
  }
  close(sockets[0]);
  close(sockets[1]);

  Require(status.ok() != expected.refused, "accepted and refused disagree");
  Require(collector.messages.size() == expected.messages.size(), "another number of messages");
  for (size_t i = 0; i < expected.messages.size(); ++i) {
    const Message& got = collector.messages[i];
    Require(std::memcmp(&got.header, &expected.messages[i].header, sizeof got.header) == 0 &&
                got.payload == expected.messages[i].payload,
            "another message");
    if (mpi_transport::ComesByMpi(got.header)) CheckAnnouncement(got);
  }
}

void Append(Seed& seed, MessageHeader header, ByteSpan payload) {
  header.payload_bytes = payload.size();
  seed.Rest(std::as_bytes(std::span(&header, 1))).Rest(payload);
}

// Of a message in three parts, with a ping after the first.
void AppendInParts(Seed& seed) {
  const auto number = [&](uint32_t value) { seed.Rest(std::as_bytes(std::span(&value, 1))); };
  MessageHeader header;
  header.payload_bytes = kLongestWhole + 100;
  seed.Rest(std::as_bytes(std::span(&header, 1)));
  const Bytes part(kLongestWhole / 2, std::byte{0x33});
  number(static_cast<uint32_t>(part.size()));
  seed.Rest(part);
  number(0);
  MessageHeader ping;
  ping.kind = MessageKind::kPing;
  Append(seed, ping, {});
  number(static_cast<uint32_t>(part.size()));
  seed.Rest(part);
  number(100);
  seed.Rest(Bytes(100, std::byte{0x44}));
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (const size_t piece : {0, 31, 99}) {
    for (const bool in_place : {false, true}) {
      Seed seed;
      seed.Byte(piece).Byte(in_place ? 1 : 0);
      MessageHeader header;
      header.kind = MessageKind::kPing;
      Append(seed, header, {});
      header.kind = MessageKind::kData;
      header.batch = 77;
      const Bytes payload(300, std::byte{0x5a});
      Append(seed, header, payload);
      header = mpi_transport::Marked(header, mpi_transport::kByMpiBit);
      Bytes announced;
      const auto gathered = mpi_transport::Encode({5, {1000, 65536}});
      for (const ByteSpan part : gathered.Pieces()) {
        announced.insert(announced.end(), part.begin(), part.end());
      }
      Append(seed, header, announced);
      AppendInParts(seed);
      seeds.push_back(seed.bytes());
    }
  }
  return seeds;
}

const Register registered({"frames", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
