// What every transport promises, whatever moves its bytes.
#include <tuple>

#include "tests/cpp/transport/transport_collectives.h"
#include "tests/cpp/transport/transport_fixture.h"

namespace dad {
namespace {

class TransportContract : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  const std::string& backend() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
  void Run(const std::function<void(Transport&)>& body) { RunRanks(backend(), size(), body); }
};

INSTANTIATE_TEST_SUITE_P(Backends, TransportContract,
                         testing::Combine(testing::Values("local", "gloo"),
                                          testing::Values(1, 2, 3, 4, 7)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
                         });

TEST_P(TransportContract, BarrierLeavesNobodyBehind) {
  std::atomic<int> arrived{0};
  Run([&](Transport& transport) {
    for (int round = 1; round <= 3; ++round) {
      ++arrived;
      ASSERT_TRUE(transport.Barrier(kLong).ok());
      EXPECT_GE(arrived.load(), round * transport.size());
    }
  });
}

TEST_P(TransportContract, AllReduceSumsEveryType) {
  Run([](Transport& t) { CheckAllReduceOfEveryType(t, 1); });
}

TEST_P(TransportContract, AllReduceServesEveryOperation) {
  Run([](Transport& t) { CheckAllReduceWithEveryOperation(t, 1); });
}

TEST_P(TransportContract, AllGatherTakesUnequalAndEmptyParts) {
  Run([](Transport& t) { CheckAllGatherOfUnequalParts(t, 1); });
}

TEST_P(TransportContract, AllGatherBlobsKeepsLengths) {
  Run([](Transport& t) { CheckAllGatherOfBlobs(t, 1); });
}

TEST_P(TransportContract, BroadcastFromEveryRoot) {
  Run([](Transport& t) { CheckBroadcastFromEveryRoot(t, 1); });
}

TEST_P(TransportContract, ReduceScatterGivesEachItsUnequalBlock) {
  Run([](Transport& t) { CheckReduceScatterOfUnequalBlocks(t, 1); });
}

TEST_P(TransportContract, AllToAllTakesUnequalAndEmptyParts) {
  Run([](Transport& t) { CheckAllToAllOfUnequalParts(t, 1); });
}

TEST_P(TransportContract, TagsKeepSendsApart) {
  Run([](Transport& t) { CheckThatTagsKeepSendsApart(t, 1); });
}

TEST_P(TransportContract, SizesThatDoNotFitAreErrors) {
  Run([](Transport& transport) {
    const std::vector<size_t> counts(transport.size(), 4);
    std::vector<uint8_t> out(1);
    EXPECT_EQ(
        transport.AllGatherV(std::as_bytes(std::span("abc")), counts, WritableBytes(out), kLong)
            .code(),
        StatusCode::kInvalidArgument);
    if (transport.size() == 1) return;
    std::vector<uint8_t> bytes(transport.rank() == 0 ? 3 : 4);
    const Status status = transport.Broadcast(WritableBytes(bytes), 0, kLong);
    if (transport.rank() != 0) {
      EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.ToString();
    }
  });
}

TEST_P(TransportContract, MessagesOfOnePeerKeepTheirOrder) {
  static constexpr uint64_t kMessages = 300;
  Run([](Transport& transport) {
    RecordingSink sink;
    for (uint64_t i = 0; i < kMessages; ++i) {
      for (int peer = 0; peer < transport.size(); ++peer) {
        if (peer == transport.rank()) continue;
        const std::string text(i * 37 % 5000, static_cast<char>('a' + i % 26));
        transport.Send(peer, DataHeader(i), BytesOf(text), nullptr);
      }
      // Half of them come before there is anyone to take them.
      if (i == kMessages / 2) transport.SetSink(&sink);
    }
    const size_t expected = kMessages * static_cast<size_t>(transport.size() - 1);
    ASSERT_TRUE(sink.WaitForMessages(expected));
    ASSERT_TRUE(transport.Barrier(kLong).ok());
    transport.SetSink(nullptr);
    std::vector<uint64_t> next(transport.size(), 0);
    for (const RecordingSink::Message& message : sink.messages()) {
      const uint64_t i = next[message.peer]++;
      ASSERT_EQ(message.header.batch, i);
      ASSERT_EQ(TextOf(message.payload),
                std::string(i * 37 % 5000, static_cast<char>('a' + i % 26)));
    }
    EXPECT_EQ(sink.messages().size(), expected);
  });
}

TEST_P(TransportContract, CountersAreExact) {
  const int64_t header = sizeof(MessageHeader);
  // Connecting over sockets ends with a barrier.
  const int64_t at_start = backend() == "local" || size() == 1 ? 0 : 1;
  Run([&](Transport& transport) {
    RecordingSink sink;
    transport.SetSink(&sink);
    const auto send = [&](int64_t batch, size_t payload_bytes) {
      for (int peer = 0; peer < transport.size(); ++peer) {
        if (peer == transport.rank()) continue;
        transport.Send(peer, DataHeader(batch), BytesOf(std::string(payload_bytes, 'x')), nullptr);
      }
    };
    const int64_t peers = transport.size() - 1;
    send(0, 10000);
    send(1, 0);
    ASSERT_TRUE(sink.WaitForMessages(static_cast<size_t>(2 * peers)));
    ASSERT_TRUE(transport.Flush(kLong).ok());
    const TransportCounters small = transport.counters();
    EXPECT_EQ(small.messages_sent, peers * (at_start + 2));
    EXPECT_EQ(small.bytes_sent, peers * (at_start * header + 10000 + 2 * header));

    // Over sockets a long payload goes in parts of at least 16 KiB; the length of each counts.
    send(2, 100000);
    ASSERT_TRUE(sink.WaitForMessages(static_cast<size_t>(3 * peers)));
    ASSERT_TRUE(transport.Flush(kLong).ok());
    const TransportCounters all = transport.counters();
    const int64_t without = peers * ((at_start + 3) * header + 110000);
    for (const int64_t bytes : {all.bytes_sent, all.bytes_received}) {
      EXPECT_EQ((bytes - without) % 4, 0);
      EXPECT_GE(bytes, without);
      EXPECT_LE(bytes, without + peers * 4 * (100000 / 16384 + 1));
    }
    EXPECT_EQ(all.messages_sent, peers * (at_start + 3));
    transport.SetSink(nullptr);
  });
}

}  // namespace
}  // namespace dad
