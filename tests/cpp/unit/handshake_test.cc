// Two ranks prove to each other that they are of one job; whoever is not gets nowhere.
#include "wire/handshake.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "util/sha256.h"

namespace dad {
namespace {

HandshakeTerms Terms() {
  HandshakeTerms terms;
  terms.secret = "0123456789abcdef";
  terms.job = "20260101-000000-abcdef";
  terms.generation = "1";
  terms.size = 4;
  terms.listening_rank = 1;
  terms.listener = "the name of one";
  return terms;
}

std::string Nonce(char fill) { return std::string(kNonceBytes, fill); }

// What the two sides have sent, in turn: hello, challenge, proof, welcome.
struct Recording {
  std::vector<std::string> sent;
  Status status;  // the first error
};

// Runs two sides against each other, as sockets would.
Recording Meet(Handshake& connecting, Handshake& listening) {
  Recording recording;
  recording.sent.push_back(connecting.Begin());
  Handshake* sides[] = {&listening, &connecting};
  for (int turn = 0; !recording.sent.back().empty(); ++turn) {
    Handshake& side = *sides[turn % 2];
    if (side.needed() != recording.sent.back().size()) break;
    Handshake::Step step = side.Take(recording.sent.back());
    recording.sent.push_back(step.send);
    if (!step.status.ok() && recording.status.ok()) recording.status = step.status;
  }
  if (recording.sent.back().empty()) recording.sent.pop_back();
  return recording;
}

Status Outcome(HandshakeTerms theirs, int rank = 3) {
  Handshake connecting = Handshake::OfConnecting(std::move(theirs), rank, RandomBytes(kNonceBytes));
  Handshake listening = Handshake::OfListening(Terms(), RandomBytes(kNonceBytes));
  Recording recording = Meet(connecting, listening);
  EXPECT_EQ(recording.status.ok(), connecting.done() && listening.done());
  if (recording.status.ok()) {
    EXPECT_EQ(listening.peer(), rank);
    EXPECT_EQ(connecting.peer(), 1);
  }
  return recording.status;
}

TEST(HandshakeTest, RanksOfOneJobMeet) { EXPECT_TRUE(Outcome(Terms()).ok()); }

TEST(HandshakeTest, RanksOfAnOpenJobMeet) {
  HandshakeTerms terms = Terms();
  terms.secret = "";
  Handshake connecting = Handshake::OfConnecting(terms, 2, Nonce('c'));
  Handshake listening = Handshake::OfListening(terms, Nonce('l'));
  EXPECT_TRUE(Meet(connecting, listening).status.ok());
}

// Fixed for good: another dad that speaks version 1 sends these bytes.
TEST(HandshakeTest, BytesOfVersionOne) {
  Handshake connecting = Handshake::OfConnecting(Terms(), 3, Nonce('c'));
  Handshake listening = Handshake::OfListening(Terms(), Nonce('l'));
  const Recording recording = Meet(connecting, listening);
  ASSERT_EQ(recording.sent.size(), 4u);
  EXPECT_EQ(HexOf(recording.sent[0]),
            "444144480100000003000000"
            "01000000" +
                HexOf(Nonce('c')));
  EXPECT_EQ(HexOf(recording.sent[1].substr(0, 40)), "4441444801000000" + HexOf(Nonce('l')));
  // By Python's hmac, from the layout in docs/wire_format.md.
  EXPECT_EQ(HexOf(recording.sent[1].substr(40)),
            "2532ca190fbebf6a67b1ac417b92b21b2b9c7f8f2486a97b283f8b3b7b293920");
  EXPECT_EQ(HexOf(recording.sent[2]),
            "b4652e027c812ffbf65c20446e3c206bed07bdbcd57b6cde7711ae204f690946");
  EXPECT_EQ(HexOf(recording.sent[3]),
            "ab13aeec2ca33e77ec31056938a6c5d8c5085fc858f34b0fbb4933c83278af25");
}

TEST(HandshakeTest, WhateverDiffersKeepsThemApart) {
  const auto with = [](auto change) {
    HandshakeTerms terms = Terms();
    change(terms);
    return Outcome(terms);
  };
  EXPECT_FALSE(with([](auto& t) { t.secret = "another secret.."; }).ok());
  EXPECT_FALSE(with([](auto& t) { t.secret = ""; }).ok());
  EXPECT_FALSE(with([](auto& t) { t.job = "another job"; }).ok());
  EXPECT_FALSE(with([](auto& t) { t.generation = "2"; }).ok());
  EXPECT_FALSE(with([](auto& t) { t.size = 5; }).ok());
  EXPECT_FALSE(with([](auto& t) { t.listener = "the name of another"; }).ok());
  EXPECT_FALSE(with([](auto& t) { t.listening_rank = 0; }).ok());
  // A border between two fields that moves changes the proof as well.
  EXPECT_FALSE(with([](auto& t) {
                 t.job += "1";
                 t.generation = "";
               }).ok());
}

TEST(HandshakeTest, OnlyHigherRanksOfTheJobConnect) {
  EXPECT_TRUE(Outcome(Terms(), 2).ok());
  for (const int rank : {-1, 0, 1, 4, 1 << 30}) EXPECT_FALSE(Outcome(Terms(), rank).ok()) << rank;
}

TEST(HandshakeTest, ErrorNamesTheSecretOrTheVersion) {
  HandshakeTerms terms = Terms();
  terms.secret = "another secret..";
  EXPECT_NE(Outcome(terms).message().find("DAD_SECRET_FILE"), std::string::npos);

  Handshake connecting = Handshake::OfConnecting(Terms(), 3, Nonce('c'));
  Handshake listening = Handshake::OfListening(Terms(), Nonce('l'));
  std::string hello = connecting.Begin();
  hello[4] = 9;
  const Handshake::Step refused = listening.Take(hello);
  EXPECT_NE(refused.status.message().find("version 9"), std::string::npos);
  ASSERT_EQ(refused.send.size(), connecting.needed());
  const Status told = connecting.Take(refused.send).status;
  EXPECT_NE(told.message().find("the same dad on all hosts"), std::string::npos) << told.message();
}

TEST(HandshakeTest, ReplayOfAnotherConnectionIsRefused) {
  Handshake connecting = Handshake::OfConnecting(Terms(), 3, RandomBytes(kNonceBytes));
  Handshake listening = Handshake::OfListening(Terms(), RandomBytes(kNonceBytes));
  const Recording heard = Meet(connecting, listening);
  ASSERT_TRUE(heard.status.ok());

  Handshake again = Handshake::OfListening(Terms(), RandomBytes(kNonceBytes));
  ASSERT_TRUE(again.Take(heard.sent[0]).status.ok());
  EXPECT_FALSE(again.Take(heard.sent[2]).status.ok());
  EXPECT_FALSE(again.done());

  Handshake other = Handshake::OfConnecting(Terms(), 3, RandomBytes(kNonceBytes));
  other.Begin();
  EXPECT_FALSE(other.Take(heard.sent[1]).status.ok());
}

TEST(HandshakeTest, ProofOfOneSideIsNotThatOfTheOther) {
  // A stranger sends back to each side what it has said.
  Handshake listening = Handshake::OfListening(Terms(), RandomBytes(kNonceBytes));
  Handshake connecting = Handshake::OfConnecting(Terms(), 3, RandomBytes(kNonceBytes));
  const Handshake::Step challenge = listening.Take(connecting.Begin());
  ASSERT_TRUE(challenge.status.ok());
  EXPECT_FALSE(
      listening.Take(challenge.send.substr(challenge.send.size() - kSha256Bytes)).status.ok());
  const Handshake::Step proof = connecting.Take(challenge.send);
  ASSERT_TRUE(proof.status.ok());
  EXPECT_FALSE(connecting.Take(proof.send).status.ok());
}

TEST(HandshakeTest, EveryChangedByteIsNoticed) {
  for (size_t message = 0; message < 4; ++message) {
    for (size_t at = 0;; ++at) {
      Handshake connecting = Handshake::OfConnecting(Terms(), 3, RandomBytes(kNonceBytes));
      Handshake listening = Handshake::OfListening(Terms(), RandomBytes(kNonceBytes));
      Handshake* sides[] = {&listening, &connecting};
      std::string bytes = connecting.Begin();
      bool failed = false;
      size_t length = 0;
      for (size_t turn = 0; turn < 4 && !failed; ++turn) {
        if (turn == message) {
          length = bytes.size();
          if (at >= length) break;
          bytes[at] = static_cast<char>(bytes[at] ^ 0x40);
        }
        Handshake::Step step = sides[turn % 2]->Take(bytes);
        failed = !step.status.ok();
        bytes = step.send;
      }
      if (at >= length) break;
      EXPECT_TRUE(failed) << "byte " << at << " of message " << message;
      EXPECT_FALSE(connecting.done() && listening.done());
    }
  }
}

TEST(HandshakeTest, TruncatedOrTooLongInputIsAnError) {
  for (const size_t length : {0, 1, 47, 49, 1000}) {
    Handshake listening = Handshake::OfListening(Terms(), Nonce('l'));
    EXPECT_FALSE(listening.Take(std::string(length, 'x')).status.ok()) << length;
    EXPECT_EQ(listening.needed(), 0u);
    EXPECT_FALSE(listening.Take("").status.ok());
  }
}

// A million with DAD_HANDSHAKES=1000000. Half of the strangers know everything but the secret.
TEST(HandshakeTest, NoneOfManyHostileHandshakesGetsIn) {
  const char* wish = std::getenv("DAD_HANDSHAKES");
  const int64_t count = wish == nullptr ? 20'000 : std::atoll(wish);
  std::mt19937_64 random(7);
  Handshake model = Handshake::OfConnecting(Terms(), 3, Nonce('c'));
  const std::string hello = model.Begin();
  int64_t challenged = 0;
  for (int64_t i = 0; i < count; ++i) {
    Handshake listening = Handshake::OfListening(Terms(), RandomBytes(kNonceBytes));
    std::string bytes = hello;
    const uint64_t kind = random() % 4;
    if (kind == 0) {
      for (char& byte : bytes) byte = static_cast<char>(random());
    } else if (kind == 1) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    Handshake::Step step = listening.Take(bytes);
    if (step.status.ok()) {
      ++challenged;
      HandshakeTerms terms = Terms();
      terms.secret = RandomBytes(16);
      Handshake guess = Handshake::OfConnecting(terms, 3, Nonce('c'));
      std::string proof = RandomBytes(kSha256Bytes);
      if (kind == 3) {
        // The proof that another secret would give.
        guess.Begin();
        proof = HmacSha256(terms.secret, bytes + step.send);
      }
      step = listening.Take(proof);
    }
    ASSERT_FALSE(step.status.ok());
    ASSERT_FALSE(listening.done());
  }
  EXPECT_GT(challenged, count / 4);
}

}  // namespace
}  // namespace dad
