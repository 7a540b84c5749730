// Messages over two roads: what the engine relies on.
#include <sys/resource.h>

#include <cstring>
#include <map>
#include <thread>

#include "tests/cpp/mpi/rank_fixture.h"

namespace dad {
namespace {

using MpiMessages = RankFixture;

constexpr size_t kByMpi = 200'000;  // well above what travels with its header

std::string Pattern(size_t num_bytes, uint64_t seed) {
  std::string text(num_bytes, '\0');
  for (size_t i = 0; i < num_bytes; ++i) text[i] = static_cast<char>((seed * 31 + i * 7) % 251);
  return text;
}

std::shared_ptr<std::string> Kept(std::string text) {
  return std::make_shared<std::string>(std::move(text));
}

void SendKept(Transport& transport, int peer, uint64_t batch, std::shared_ptr<std::string> text) {
  GatherBuffer payload;
  payload.Reference(text->data(), text->size());
  transport.Send(peer, DataHeader(batch), std::move(payload), text);
}

TEST_F(MpiMessages, KeepTheirOrderWhateverTheirRoad) {
  static constexpr uint64_t kMessages = 120;
  const auto bytes_of = [](uint64_t i) { return i % 5 == 0 ? kByMpi + i * 1000 : i * 37; };
  auto transport = Connect();
  RecordingSink sink;
  for (uint64_t i = 0; i < kMessages; ++i) {
    ForEachPeer([&](int peer) { SendKept(*transport, peer, i, Kept(Pattern(bytes_of(i), i))); });
    // Half of them come before there is anyone to take them.
    if (i == kMessages / 2) transport->SetSink(&sink);
  }
  const size_t expected = kMessages * static_cast<size_t>(size() - 1);
  ASSERT_TRUE(sink.WaitForMessages(expected));
  ASSERT_TRUE(transport->Barrier(kLong).ok());
  transport->SetSink(nullptr);
  std::map<int, uint64_t> next;
  for (const RecordingSink::Message& message : sink.messages()) {
    const uint64_t i = next[message.peer]++;
    ASSERT_EQ(message.header.batch, i);
    ASSERT_EQ(TextOf(message.payload), Pattern(bytes_of(i), i));
  }
}

TEST_F(MpiMessages, FromManyThreadsArriveWhole) {
  static constexpr uint64_t kThreads = 4;
  static constexpr uint64_t kEach = 10;
  auto transport = Connect();
  RecordingSink sink;
  transport->SetSink(&sink);
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint64_t i = thread * kEach; i < (thread + 1) * kEach; ++i) {
        ForEachPeer([&](int peer) { SendKept(*transport, peer, i, Kept(Pattern(kByMpi + i, i))); });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(sink.WaitForMessages(kThreads * kEach * static_cast<size_t>(size() - 1)));
  ASSERT_TRUE(transport->Barrier(kLong).ok());
  transport->SetSink(nullptr);
  for (const RecordingSink::Message& message : sink.messages()) {
    const uint64_t i = message.header.batch;
    EXPECT_EQ(TextOf(message.payload), Pattern(kByMpi + i, i));
  }
}

// Has a place for every message.
class ReservingSink : public RecordingSink {
 public:
  std::byte* Reserve(int peer, const MessageHeader& header) override {
    std::string& place = places[{peer, header.batch}];
    place.resize(header.payload_bytes);
    return reinterpret_cast<std::byte*>(place.data());
  }
  std::map<std::pair<int, uint64_t>, std::string> places;
};

TEST_F(MpiMessages, AreWrittenWhereTheSinkSays) {
  auto transport = Connect();
  ReservingSink sink;
  transport->SetSink(&sink);
  ASSERT_TRUE(transport->Barrier(kLong).ok());  // everybody's sink is there
  const std::vector<size_t> sizes = {100, kByMpi, 3 * kByMpi};
  for (size_t i = 0; i < sizes.size(); ++i) {
    ForEachPeer([&](int peer) { SendKept(*transport, peer, i, Kept(Pattern(sizes[i], i))); });
  }
  ASSERT_TRUE(sink.WaitForMessages(sizes.size() * static_cast<size_t>(size() - 1)));
  ASSERT_TRUE(transport->Barrier(kLong).ok());
  transport->SetSink(nullptr);
  for (const RecordingSink::Message& message : sink.messages()) {
    EXPECT_EQ(message.payload.size(), 0u);
    EXPECT_EQ(message.header.payload_bytes, sizes[message.header.batch]);
  }
  for (const auto& [key, place] : sink.places) {
    EXPECT_EQ(place, Pattern(sizes[key.second], key.second));
  }
}

TEST_F(MpiMessages, OfManyPiecesArriveAsOne) {
  auto transport = Connect();
  RecordingSink sink;
  transport->SetSink(&sink);
  const auto whole = Kept(Pattern(3'000'000, 5));
  ForEachPeer([&](int peer) {
    GatherBuffer payload;
    size_t at = 0;
    for (size_t i = 0; at < whole->size(); ++i) {
      // Copied ones, runs of small ones, and large ones.
      const size_t piece = i % 10 == 9 ? 700'000 : (i % 2 == 0 ? 8 : 5000);
      const size_t num_bytes = std::min(piece, whole->size() - at);
      payload.Reference(whole->data() + at, num_bytes);
      at += num_bytes;
    }
    transport->Send(peer, DataHeader(0), std::move(payload), whole);
  });
  ASSERT_TRUE(sink.WaitForMessages(static_cast<size_t>(size() - 1)));
  ASSERT_TRUE(transport->Flush(kLong).ok());
  ASSERT_TRUE(transport->Barrier(kLong).ok());
  transport->SetSink(nullptr);
  for (const RecordingSink::Message& message : sink.messages()) {
    EXPECT_EQ(TextOf(message.payload), *whole);
  }
}

TEST_F(MpiMessages, OfSixtyFourMegabytesArrive) {
  auto transport = Connect();
  RecordingSink sink;
  transport->SetSink(&sink);
  const auto text = Kept(Pattern(64 << 20, 1));
  if (size() > 1 && rank() == 0) SendKept(*transport, size() - 1, 0, text);
  if (size() > 1 && rank() == size() - 1) {
    ASSERT_TRUE(sink.WaitForMessages(1));
    EXPECT_TRUE(TextOf(sink.messages()[0].payload) == *text);
  }
  ASSERT_TRUE(transport->Barrier(kLong).ok());
  transport->SetSink(nullptr);
}

TEST_F(MpiMessages, AreLetGoOnceTheyHaveLeft) {
  auto transport = Connect();
  std::vector<std::weak_ptr<std::string>> kept;
  for (const size_t num_bytes : {size_t{10'000}, kByMpi, 10 * kByMpi}) {
    ForEachPeer([&](int peer) {
      auto text = Kept(Pattern(num_bytes, 0));
      kept.push_back(text);
      SendKept(*transport, peer, 0, std::move(text));
    });
  }
  ASSERT_TRUE(transport->Flush(kLong).ok());
  for (const auto& text : kept) EXPECT_TRUE(text.expired());
  ASSERT_TRUE(transport->Barrier(kLong).ok());
}

TEST_F(MpiMessages, AreCounted) {
  auto transport = Connect();
  RecordingSink sink;
  transport->SetSink(&sink);
  ASSERT_TRUE(transport->Barrier(kLong).ok());
  const TransportCounters before = transport->counters();
  ForEachPeer([&](int peer) {
    SendKept(*transport, peer, 0, Kept(Pattern(kByMpi, 0)));
    SendKept(*transport, peer, 1, Kept(""));
  });
  const int64_t peers = size() - 1;
  ASSERT_TRUE(sink.WaitForMessages(static_cast<size_t>(2 * peers)));
  ASSERT_TRUE(transport->Flush(kLong).ok());
  const TransportCounters after = transport->counters();
  transport->SetSink(nullptr);
  // Two headers; tag and length of the payload's one part; the payload.
  const int64_t each = 2 * sizeof(MessageHeader) + 4 + 8 + kByMpi;
  EXPECT_EQ(after.messages_sent - before.messages_sent, 2 * peers);
  EXPECT_EQ(after.bytes_sent - before.bytes_sent, each * peers);
  ASSERT_TRUE(transport->Barrier(kLong).ok());
  // Everybody has sent the same.
  EXPECT_EQ(transport->counters().bytes_received, transport->counters().bytes_sent);
}

TEST_F(MpiMessages, GoodbyeComesAfterWhatWasSentBeforeIt) {
  auto transport = Connect();
  RecordingSink sink;
  transport->SetSink(&sink);
  MessageHeader goodbye;
  goodbye.kind = MessageKind::kGoodbye;
  ForEachPeer([&](int peer) {
    SendKept(*transport, peer, 0, Kept(Pattern(20 * kByMpi, 0)));
    transport->Send(peer, goodbye, {}, nullptr);
  });
  ASSERT_TRUE(sink.WaitForMessages(2 * static_cast<size_t>(size() - 1)));
  ASSERT_TRUE(transport->Flush(kLong).ok());
  transport->Close();
  EXPECT_TRUE(sink.lost().empty());
  std::map<int, MessageKind> last;
  for (const auto& message : sink.messages()) last[message.peer] = message.header.kind;
  for (const auto& [peer, kind] : last) EXPECT_EQ(kind, MessageKind::kGoodbye) << "rank " << peer;
}

TEST_F(MpiMessages, PeerThatLeavesIsLostAfterItsMessages) {
  auto transport = Connect();
  RecordingSink sink;
  if (size() == 1) return;
  if (rank() == 0) {
    transport->SetSink(&sink);
    ASSERT_TRUE(sink.WaitForLost(static_cast<size_t>(size() - 1)));
    EXPECT_EQ(sink.messages().size(), static_cast<size_t>(size() - 1));
  } else {
    SendKept(*transport, 0, 0, Kept(Pattern(20 * kByMpi, 0)));
    ASSERT_TRUE(transport->Flush(kLong).ok());
    transport->Close();
  }
}

TEST_F(MpiMessages, TransportsComeAndGo) {
  for (int i = 0; i < 10; ++i) {
    auto transport = Connect();
    std::string text = rank() == 0 ? Pattern(kByMpi, i) : std::string(kByMpi, '\0');
    ASSERT_TRUE(transport->Broadcast(std::as_writable_bytes(std::span(text)), 0, kLong).ok());
    EXPECT_EQ(text, Pattern(kByMpi, i));
    ASSERT_TRUE(transport->Flush(kLong).ok());
  }
}

TEST_F(MpiMessages, IdleTransportUsesNoProcessor) {
  auto transport = Connect();
  std::string text(kByMpi, 'x');
  ASSERT_TRUE(transport->Broadcast(std::as_writable_bytes(std::span(text)), 0, kLong).ok());
  ASSERT_TRUE(transport->Flush(kLong).ok());
  ASSERT_TRUE(transport->Barrier(kLong).ok());
  const auto used_ms = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000;
  };
  const auto before = used_ms();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_LT(used_ms() - before, 50);
  ASSERT_TRUE(transport->Barrier(kLong).ok());
}

}  // namespace
}  // namespace dad
