// Messages and faults, over every transport: memory, lifetimes, peers that leave, fall
// silent or never come; and what the local network does on demand.
#include <cstring>
#include <future>
#include <utility>

#include "tests/cpp/transport/transport_fixture.h"

namespace dad {
namespace {

using std::chrono::milliseconds;

class TransportFaults : public testing::TestWithParam<std::string> {
 protected:
  const std::string& backend() const { return GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Backends, TransportFaults, testing::Values("local", "gloo"),
                         [](const auto& info) { return info.param; });

class ReservingSink : public RecordingSink {
 public:
  explicit ReservingSink(std::vector<std::byte>* place) : place_(place) {}
  std::byte* Reserve(int, const MessageHeader& header) override {
    if (header.payload_bytes != place_->size()) return nullptr;
    return place_->data();
  }

 private:
  std::vector<std::byte>* const place_;
};

TEST_P(TransportFaults, LargePayloadGoesWhereItWasReserved) {
  static constexpr size_t kBytes = 64 << 20;
  RunRanks(backend(), 2, [](Transport& transport) {
    const int peer = 1 - transport.rank();
    std::vector<std::byte> place(kBytes);
    ReservingSink sink(&place);
    transport.SetSink(&sink);
    ASSERT_TRUE(transport.Barrier(kLong).ok());

    auto mine = std::make_shared<std::vector<std::byte>>(kBytes);
    for (size_t i = 0; i < kBytes; i += 4093) (*mine)[i] = static_cast<std::byte>(i % 251);
    std::weak_ptr<void> kept = mine;
    GatherBuffer payload;  // in two pieces, with a small one that is copied between
    payload.Reference(mine->data(), kBytes / 2);
    payload.Append(mine->data() + kBytes / 2, 100);
    payload.Reference(mine->data() + kBytes / 2 + 100, kBytes / 2 - 100);
    transport.Send(peer, DataHeader(1), std::move(payload), std::move(mine));
    transport.Send(peer, DataHeader(2), BytesOf("after"), nullptr);

    ASSERT_TRUE(sink.WaitForMessages(2));
    ASSERT_TRUE(transport.Flush(kLong).ok());
    EXPECT_TRUE(kept.expired()) << "not released though all bytes have left";
    transport.SetSink(nullptr);
    EXPECT_EQ(sink.messages()[0].payload.size(), 0u);
    EXPECT_EQ(sink.messages()[0].header.payload_bytes, kBytes);
    EXPECT_EQ(TextOf(sink.messages()[1].payload), "after");
    for (size_t i = 0; i < kBytes; i += 4093) {
      ASSERT_EQ(place[i], static_cast<std::byte>(i % 251)) << "byte " << i;
    }
  });
}

TEST_P(TransportFaults, SilentPeerIsATimeoutThatNamesIt) {
  RunRanks(backend(), 3, [](Transport& transport) {
    if (transport.rank() != 2) {
      const auto begin = std::chrono::steady_clock::now();
      const Status status = transport.Barrier(milliseconds(100));
      EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.ToString();
      EXPECT_NE(status.message().find("rank 2"), std::string::npos) << status.message();
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    }
    // The silent one stays until the others have given up.
    std::byte done{};
    for (const int peer : {0, 1}) {
      if (transport.rank() == 2) {
        ASSERT_TRUE(transport.ReceiveFrom(peer, 5, {&done, 1}, kLong).ok());
      } else if (peer == transport.rank()) {
        ASSERT_TRUE(transport.SendTo(2, 5, {&done, 1}, kLong).ok());
      }
    }
  });
}

TEST_P(TransportFaults, PeerThatClosesIsAnErrorThatNamesIt) {
  RunRanks(backend(), 3, [](Transport& transport) {
    RecordingSink sink;
    transport.SetSink(&sink);
    ASSERT_TRUE(transport.Barrier(kLong).ok());
    if (transport.rank() == 1) {
      ASSERT_TRUE(transport.Flush(kLong).ok());
      transport.Close();
      transport.Close();
      transport.Send(0, DataHeader(1), BytesOf("swallowed"), nullptr);
      EXPECT_TRUE(sink.lost().empty()) << "one's own Close is no loss";
      return;
    }
    const Status status = transport.Barrier(kLong);
    EXPECT_EQ(status.code(), StatusCode::kAborted) << status.ToString();
    EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
    ASSERT_TRUE(sink.WaitForLost(1));
    transport.Send(1, DataHeader(1), BytesOf("swallowed"), nullptr);
    // The survivors go on with each other, and part together.
    const int other = 2 - transport.rank();
    std::byte byte{};
    ASSERT_TRUE(transport.SendTo(other, 5, {&byte, 1}, kLong).ok());
    ASSERT_TRUE(transport.ReceiveFrom(other, 5, {&byte, 1}, kLong).ok());
    ASSERT_TRUE(transport.Flush(kLong).ok());
    transport.Close();
    ASSERT_FALSE(sink.lost().empty());
    EXPECT_EQ(sink.lost()[0].first, 1);
    EXPECT_NE(sink.lost()[0].second.message().find("rank 1"), std::string::npos);
  });
}

TEST_P(TransportFaults, WhatWasFlushedArrivesThoughTheSenderIsGone) {
  RunRanks(backend(), 2, [](Transport& transport) {
    if (transport.rank() == 0) {
      transport.Send(1, DataHeader(7), BytesOf(std::string(1 << 20, 'z')), nullptr);
      MessageHeader goodbye;
      goodbye.kind = MessageKind::kGoodbye;
      transport.Send(1, goodbye, {}, nullptr);
      ASSERT_TRUE(transport.Flush(kLong).ok());
      transport.Close();
      return;
    }
    const Status status = transport.Barrier(kLong);
    EXPECT_EQ(status.code(), StatusCode::kAborted) << status.ToString();
    RecordingSink sink;
    transport.SetSink(&sink);  // gets what came before it
    transport.SetSink(nullptr);
    ASSERT_EQ(sink.messages().size(), 2u);
    EXPECT_EQ(sink.messages()[0].payload.size(), size_t{1} << 20);
    EXPECT_EQ(sink.messages()[1].header.kind, MessageKind::kGoodbye);
    EXPECT_TRUE(sink.lost().empty()) << "a peer that said goodbye is not lost";
  });
}

TEST_P(TransportFaults, DetachedSinkIsNotCalled) {
  RunRanks(backend(), 2, [](Transport& transport) {
    RecordingSink first;
    transport.SetSink(&first);
    transport.SetSink(nullptr);
    ASSERT_TRUE(transport.Barrier(kLong).ok());
    transport.Send(1 - transport.rank(), DataHeader(1), BytesOf("x"), nullptr);
    ASSERT_TRUE(transport.Barrier(kLong).ok());
    EXPECT_TRUE(first.messages().empty());
    RecordingSink second;
    transport.SetSink(&second);
    EXPECT_TRUE(second.WaitForMessages(1));
    transport.SetSink(nullptr);
  });
}

TEST_P(TransportFaults, ComingAndGoingLeavesNothingBehind) {
  const auto cycle = [&] {
    RunRanks(backend(), 3,
             [](Transport& transport) { ASSERT_TRUE(transport.Barrier(kLong).ok()); });
  };
  cycle();  // what is opened once and for all
  const size_t files = CountEntries("/proc/self/fd");
  const size_t threads = CountEntries("/proc/self/task");
  for (int i = 0; i < 50; ++i) cycle();
  EXPECT_TRUE(EntriesFallTo(files, "/proc/self/fd"));
  EXPECT_TRUE(EntriesFallTo(threads, "/proc/self/task"));
}

// Each rank goes away in the middle of everything, with memory the others and itself
// were using: for the sanitizers.
TEST_P(TransportFaults, CloseAmidTraffic) {
  RunRanks(backend(), 3, [](Transport& transport) {
    static constexpr size_t kBytes = 256 << 10;
    std::vector<std::byte> place(kBytes);
    ReservingSink sink(&place);
    transport.SetSink(&sink);
    const auto send = [&transport] {
      for (int i = 0; i < 60; ++i) {
        auto mine = std::make_shared<std::vector<std::byte>>(kBytes);
        for (int peer = 0; peer < transport.size(); ++peer) {
          if (peer == transport.rank()) continue;
          GatherBuffer payload;
          payload.Reference(mine->data(), mine->size());
          transport.Send(peer, DataHeader(1), std::move(payload), mine);
        }
      }
    };
    std::thread other(send);
    send();
    transport.Close();
    place = {};
    other.join();
  });
}

TEST(GlooWire, AnotherWireFormatIsALossThatSaysSo) {
  RunRanks("gloo", 2, [](Transport& transport) {
    RecordingSink sink;
    transport.SetSink(&sink);
    if (transport.rank() == 0) {
      MessageHeader header;
      header.magic = kWireMagic + (1u << 24);
      transport.Send(1, header, {}, nullptr);
    }
    ASSERT_TRUE(sink.WaitForLost(1));
    transport.SetSink(nullptr);
    if (transport.rank() == 1) {
      EXPECT_NE(sink.lost()[0].second.message().find("wire format"), std::string::npos);
    }
  });
}

// Reads nothing more once it has got the first message, until it is told to go on.
class StoppingSink : public RecordingSink {
 public:
  std::byte* Reserve(int, const MessageHeader&) override {
    go_on_.wait();
    return nullptr;
  }
  void GoOn() { release_.set_value(); }

 private:
  std::promise<void> release_;
  std::shared_future<void> go_on_ = release_.get_future().share();
};

// What Worker takes for a sign of life: bytes that move, but not those that the kernel of a stopped
// process acknowledges on its behalf.
TEST(GlooProgress, CountsBytesThatMoveAndNotWhatAStoppedPeersKernelTakes) {
  TransportMaker maker("gloo", 2);
  StoppingSink stopped;
  std::promise<void> looked;
  // Looks some time after something was sent, as Worker does: a kernel may delay an acknowledgement
  // by 200 ms. Then until nothing has moved for half a second.
  const auto settle = [](Transport& transport) {
    std::this_thread::sleep_for(milliseconds(300));
    int64_t last = -1;
    for (int same = 0; same < 10; ++same) {
      const int64_t now = transport.ProgressWith(1);
      if (now != last) same = 0;
      last = now;
      std::this_thread::sleep_for(milliseconds(50));
    }
    return last;
  };
  RunRanks(maker, [&](Transport& transport) {
    if (transport.rank() == 1) {
      transport.SetSink(&stopped);
      EXPECT_TRUE(stopped.WaitForMessages(3));
      EXPECT_GE(transport.ProgressWith(0), 64 << 20);
      looked.get_future().wait();
      transport.SetSink(nullptr);
      return;
    }
    // The receiver stops at its header, and the ping behind it gets as far as its kernel.
    transport.Send(1, DataHeader(1), BytesOf("stop"), nullptr);
    MessageHeader ping;
    ping.kind = MessageKind::kPing;
    const int64_t idle = settle(transport);
    transport.Send(1, ping, {}, nullptr);
    EXPECT_EQ(settle(transport), idle) << "a ping that nobody reads is no sign of life";
    // A large message fills the buffers of both kernels and then goes no further.
    const int64_t before = transport.ProgressWith(1);
    transport.Send(1, DataHeader(2), BytesOf(std::string(64 << 20, 'x')), nullptr);
    const int64_t full = settle(transport);
    EXPECT_GT(full, before);
    EXPECT_LT(full, 64 << 20);
    stopped.GoOn();
    EXPECT_TRUE(transport.Flush(kLong).ok());
    looked.set_value();
  });
}

TEST(GlooStart, SaysWhoDidNotCome) {
  TransportMaker maker("gloo", 3);
  const size_t threads = CountEntries("/proc/self/task");
  std::vector<std::thread> ranks;
  for (const int rank : {0, 2}) {
    ranks.emplace_back([&maker, rank] {
      const auto transport = maker.Connect(rank, 0.5);
      ASSERT_FALSE(transport.ok());
      EXPECT_EQ(transport.status().code(), StatusCode::kTimeout);
      EXPECT_NE(transport.status().message().find("rank 1 "), std::string::npos)
          << transport.status().message();
    });
  }
  for (std::thread& thread : ranks) thread.join();
  EXPECT_TRUE(EntriesFallTo(threads, "/proc/self/task"));
}

TEST(Registry, SaysWhatIsMissingAndHowToGetIt) {
  const Status status = PluginAvailable("gloo", "/nonexistent");
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("libdad_gloo.so"), std::string::npos);
  EXPECT_NE(status.message().find("apt install"), std::string::npos);
  EXPECT_EQ(status.message().find('\n'), std::string::npos);
  EXPECT_EQ(PluginAvailable("pigeon", "").code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(PluginAvailable("gloo", DAD_PLUGIN_DIR).ok());
}

TEST(LocalNetwork, DelaysAndKeepsTheOrderOfEachPeer) {
  LocalNetwork network(3);
  network.SetDelay(std::chrono::microseconds(200));
  network.SetJitter(std::chrono::microseconds(500), 1);
  RecordingSink sink;  // outlives the receiver, which hears of the others' end
  auto receiver = network.Connect(0);
  auto one = network.Connect(1);
  auto two = network.Connect(2);
  receiver->SetSink(&sink);
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < 50; ++i) {
    one->Send(0, DataHeader(i), {}, nullptr);
    two->Send(0, DataHeader(i), {}, nullptr);
  }
  ASSERT_TRUE(sink.WaitForMessages(100));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::microseconds(200));
  uint64_t next[3] = {};
  for (const RecordingSink::Message& message : sink.messages()) {
    EXPECT_EQ(message.header.batch, next[message.peer]++);
  }
}

TEST(LocalNetwork, SilencedRankIsNotHeard) {
  LocalNetwork network(2);
  auto listener = network.Connect(0);
  auto speaker = network.Connect(1);
  network.Silence(1);
  std::byte byte{};
  ASSERT_TRUE(speaker->SendTo(0, 1, {&byte, 1}, kLong).ok());
  EXPECT_EQ(listener->ReceiveFrom(1, 1, {&byte, 1}, milliseconds(20)).code(), StatusCode::kTimeout);
}

TEST(LocalNetwork, KilledRankIsLostToBothSides) {
  LocalNetwork network(2);
  auto survivor = network.Connect(0);
  auto victim = network.Connect(1);
  network.KillAfterSends(1, 1);
  std::byte byte{};
  ASSERT_TRUE(victim->SendTo(0, 1, {&byte, 1}, kLong).ok());
  ASSERT_TRUE(victim->SendTo(0, 2, {&byte, 1}, kLong).ok());
  EXPECT_TRUE(survivor->ReceiveFrom(1, 1, {&byte, 1}, kLong).ok());
  EXPECT_EQ(survivor->ReceiveFrom(1, 2, {&byte, 1}, kLong).code(), StatusCode::kAborted);
  EXPECT_EQ(victim->ReceiveFrom(0, 2, {&byte, 1}, kLong).code(), StatusCode::kAborted);
}

}  // namespace
}  // namespace dad
