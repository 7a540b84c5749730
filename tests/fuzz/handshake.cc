// wire/handshake.h: one side, given anything; and the other side's part of a real handshake, with
// bytes changed. Nobody who does not know the secret gets in.
#include "wire/handshake.h"

#include "fuzz.h"

namespace dad::fuzz {
namespace {

HandshakeTerms Terms(const char* secret) {
  HandshakeTerms terms;
  terms.secret = secret;
  terms.job = "job";
  terms.generation = "1";
  terms.size = 4;
  terms.listening_rank = 1;
  terms.listener = "listener";
  return terms;
}

Handshake Side(bool connects) {
  const std::string nonce(kNonceBytes, connects ? 'c' : 'l');
  if (!connects) return Handshake::OfListening(Terms("the secret of a job"), nonce);
  Handshake side = Handshake::OfConnecting(Terms("the secret of a job"), 3, nonce);
  side.Begin();
  return side;
}

void Run(ByteSpan input) {
  Input from(input);
  Handshake side = Side(from.Byte() % 2 == 1);
  std::string rest(reinterpret_cast<const char*>(from.Rest().data()), from.Rest().size());
  // The nonces are fixed here, so an input that has been made with the secret would get in: the
  // seeds know another one.
  while (side.needed() != 0 && rest.size() >= side.needed()) {
    const std::string bytes = rest.substr(0, side.needed());
    rest.erase(0, bytes.size());
    const Handshake::Step step = side.Take(bytes);
    Require(step.send.size() <= 256, "an answer longer than any message of a handshake");
    Require(step.status.ok() || side.needed() == 0, "a handshake that goes on after an error");
  }
  Require(!side.done(), "a stranger got in");
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  const std::string nonce(kNonceBytes, 'c');
  Handshake connecting = Handshake::OfConnecting(Terms("another secret"), 3, nonce);
  Handshake listening =
      Handshake::OfListening(Terms("another secret"), std::string(kNonceBytes, 'l'));
  const std::string hello = connecting.Begin();
  const std::string challenge = listening.Take(hello).send;
  const std::string proof = connecting.Take(challenge).send;
  const std::string welcome = listening.Take(proof).send;
  seeds.push_back(Seed().Byte(0).Text(hello + proof).bytes());
  seeds.push_back(Seed().Byte(1).Text(challenge + welcome).bytes());
  seeds.push_back(Seed().Byte(0).Text("GET / HTTP/1.0\r\n\r\n" + std::string(64, ' ')).bytes());
  std::string other_version = hello;
  other_version[4] = 2;
  seeds.push_back(Seed().Byte(0).Text(other_version).bytes());
  return seeds;
}

const Register registered({"handshake", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
