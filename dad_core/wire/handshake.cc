#include "wire/handshake.h"

#include <span>
#include <utility>

#include "util/byte_io.h"
#include "util/sha256.h"

namespace dad {
namespace {

constexpr uint32_t kMagic = 0x48444144;  // "DADH"
constexpr size_t kHelloBytes = 4 + 2 + 2 + 4 + 4 + kNonceBytes;
constexpr size_t kChallengeHeadBytes = 4 + 2 + 2 + kNonceBytes;

// Sent in a challenge; unproven, so only a hint for the error message.
enum class Refusal : uint16_t { kNone = 0, kVersion, kRanks };

std::string TextOf(const ByteWriter& writer) {
  return std::string(reinterpret_cast<const char*>(writer.bytes().data()), writer.bytes().size());
}

std::span<const std::byte> BytesOf(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string ChallengeHead(Refusal refusal, std::string_view nonce) {
  ByteWriter writer;
  writer.Value(kMagic);
  writer.Value(kHandshakeVersion);
  writer.Value(static_cast<uint16_t>(refusal));
  writer.Bytes(BytesOf(nonce));
  return TextOf(writer);
}

std::string RefusalOf(Refusal why) {
  return ChallengeHead(why, std::string(kNonceBytes, '\0')) + std::string(kSha256Bytes, '\0');
}

std::string Versions(int theirs) {
  return "version " + std::to_string(theirs) + " of the handshake there, " +
         std::to_string(kHandshakeVersion) + " here; install the same dad on all hosts";
}

}  // namespace

Handshake Handshake::OfConnecting(HandshakeTerms terms, int rank, std::string nonce) {
  Handshake made(std::move(terms), true, std::move(nonce));
  made.connecting_rank_ = rank;
  return made;
}

Handshake Handshake::OfListening(HandshakeTerms terms, std::string nonce) {
  return Handshake(std::move(terms), false, std::move(nonce));
}

std::string Handshake::Begin() {
  if (!connects_) return "";
  ByteWriter writer;
  writer.Value(kMagic);
  writer.Value(kHandshakeVersion);
  writer.Value(uint16_t{0});
  writer.Value(static_cast<uint32_t>(connecting_rank_));
  writer.Value(static_cast<uint32_t>(terms_.listening_rank));
  writer.Bytes(BytesOf(nonce_));
  return hello_ = TextOf(writer);
}

size_t Handshake::needed() const {
  switch (stage_) {
    case Stage::kHello: return kHelloBytes;
    case Stage::kChallenge: return kChallengeHeadBytes + kSha256Bytes;
    case Stage::kProof:
    case Stage::kWelcome: return kSha256Bytes;
    case Stage::kDone:
    case Stage::kFailed: return 0;
  }
  return 0;
}

int Handshake::peer() const { return connects_ ? terms_.listening_rank : connecting_rank_; }

Handshake::Step Handshake::Take(std::string_view bytes) {
  if (needed() == 0 || bytes.size() != needed()) {
    return Fail(Status::Internal("a handshake was given " + std::to_string(bytes.size()) +
                                 " bytes where it needs " + std::to_string(needed())));
  }
  switch (stage_) {
    case Stage::kHello: return TakeHello(bytes);
    case Stage::kChallenge: return TakeChallenge(bytes);
    case Stage::kProof: return TakeProof(bytes);
    default: return TakeWelcome(bytes);
  }
}

Handshake::Step Handshake::TakeHello(std::string_view bytes) {
  ByteReader reader(BytesOf(bytes));
  if (reader.Value<uint32_t>() != kMagic) return Fail(Status::Aborted("not a rank of dad"));
  const auto version = reader.Value<uint16_t>();
  if (version != kHandshakeVersion) {
    return Fail(Status::Aborted(Versions(version)), RefusalOf(Refusal::kVersion));
  }
  reader.Value<uint16_t>();
  const auto from = reader.Value<uint32_t>();
  const auto to = reader.Value<uint32_t>();
  // Only ranks with higher numbers connect to us.
  if (to != static_cast<uint32_t>(terms_.listening_rank) || from <= to ||
      from >= static_cast<uint32_t>(terms_.size)) {
    return Fail(Status::Aborted("rank " + std::to_string(from) + " has no business with rank " +
                                std::to_string(to)),
                RefusalOf(Refusal::kRanks));
  }
  connecting_rank_ = static_cast<int>(from);
  hello_ = bytes;
  challenge_ = ChallengeHead(Refusal::kNone, nonce_);
  stage_ = Stage::kProof;
  return {challenge_ + Prove("dad listening"), Status::Ok()};
}

Handshake::Step Handshake::TakeChallenge(std::string_view bytes) {
  ByteReader reader(BytesOf(bytes));
  if (reader.Value<uint32_t>() != kMagic) return Fail(Status::Aborted("no rank of dad answers"));
  const auto version = reader.Value<uint16_t>();
  const auto refusal = static_cast<Refusal>(reader.Value<uint16_t>());
  if (version != kHandshakeVersion || refusal == Refusal::kVersion) {
    return Fail(Status::Aborted(Versions(version)));
  }
  if (refusal != Refusal::kNone) {
    return Fail(Status::Aborted("another rank, or a rank of another job, listens there"));
  }
  challenge_ = bytes.substr(0, kChallengeHeadBytes);
  if (!SameBytes(bytes.substr(kChallengeHeadBytes), Prove("dad listening"))) {
    return Fail(
        Status::Aborted("it does not prove that it knows the secret of this job; is "
                        "DAD_SECRET_FILE the same on all "
                        "hosts, or does another job listen there?"));
  }
  stage_ = Stage::kWelcome;
  return {Prove("dad connecting"), Status::Ok()};
}

Handshake::Step Handshake::TakeProof(std::string_view bytes) {
  if (!SameBytes(bytes, Prove("dad connecting"))) {
    return Fail(Status::Aborted("it does not prove that it knows the secret of this job"));
  }
  stage_ = Stage::kDone;
  return {Prove("dad welcome"), Status::Ok()};
}

Handshake::Step Handshake::TakeWelcome(std::string_view bytes) {
  if (!SameBytes(bytes, Prove("dad welcome"))) {
    return Fail(Status::Aborted("its welcome is not signed with the secret of this job"));
  }
  stage_ = Stage::kDone;
  return {"", Status::Ok()};
}

Handshake::Step Handshake::Fail(Status why, std::string send) {
  stage_ = Stage::kFailed;
  return {std::move(send), std::move(why)};
}

std::string Handshake::Prove(std::string_view label) const {
  ByteWriter writer;
  writer.Text(std::string(label));
  writer.Bytes(BytesOf(hello_));
  writer.Bytes(BytesOf(challenge_));
  writer.Text(terms_.job);
  writer.Text(terms_.generation);
  writer.Value(static_cast<uint32_t>(terms_.size));
  writer.Text(terms_.listener);
  return HmacSha256(terms_.secret, TextOf(writer));
}

}  // namespace dad
