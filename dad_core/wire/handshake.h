// How two ranks prove to each other that they belong to the same job, before either reads anything
// else from their connection. The rank that connects speaks first:
//
//   hello      magic, version, the two ranks, a fresh nonce
//   challenge  magic, version, refusal, a fresh nonce, proof of the listening rank
//   proof      of the connecting rank
//   welcome    proof that the listening rank has accepted it
//
// A proof is HMAC-SHA256, by the secret of the job, over hello, the head of the challenge, and the
// values on which the two must agree without sending them: the job, the generation (the init() or
// elastic round), its size, and the name that the listening rank has given to its socket in the
// rendezvous store. A recording of another connection, job or round is therefore useless. In an
// open job, which has no secret, this still keeps two jobs apart. docs/wire_format.md has the
// bytes. Pure functions of their input: no I/O.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "dad/export.h"
#include "dad/status.h"

namespace dad {

inline constexpr uint16_t kHandshakeVersion = 1;
inline constexpr size_t kNonceBytes = 32;

// What both ranks know already.
struct HandshakeTerms {
  std::string secret;  // empty: an open job
  std::string job;
  std::string generation;
  int size = 0;
  int listening_rank = 0;
  std::string listener;  // the name of its socket
};

// One side of one connection. Reads needed() bytes, gives them to Take(), sends what Take returns.
class DAD_EXPORT Handshake {
 public:
  struct Step {
    std::string send;  // also if the status is an error: the refusal
    Status status;
  };

  // For `rank`, which connects to terms.listening_rank. `nonce`: kNonceBytes, fresh.
  static Handshake OfConnecting(HandshakeTerms terms, int rank, std::string nonce);
  static Handshake OfListening(HandshakeTerms terms, std::string nonce);

  // What to send before anything is read.
  std::string Begin();
  // How many bytes have to be read next; 0: done.
  size_t needed() const;
  // Takes exactly needed() bytes. After an error the connection has to be closed.
  Step Take(std::string_view bytes);

  bool done() const { return stage_ == Stage::kDone; }
  // The rank at the other end, once done.
  int peer() const;

 private:
  enum class Stage { kHello, kChallenge, kProof, kWelcome, kDone, kFailed };

  Handshake(HandshakeTerms terms, bool connects, std::string nonce)
      : terms_(std::move(terms)),
        connects_(connects),
        nonce_(std::move(nonce)),
        stage_(connects ? Stage::kChallenge : Stage::kHello) {}

  Step TakeHello(std::string_view bytes);
  Step TakeChallenge(std::string_view bytes);
  Step TakeProof(std::string_view bytes);
  Step TakeWelcome(std::string_view bytes);
  Step Fail(Status why, std::string send = "");
  std::string Prove(std::string_view label) const;

  HandshakeTerms terms_;
  bool connects_;
  std::string nonce_;
  Stage stage_;
  int connecting_rank_ = -1;
  std::string hello_;
  std::string challenge_;  // its head, without the proof
};

}  // namespace dad
