// What every transport promises, whatever moves its bytes.
#include <cstring>
#include <numeric>
#include <tuple>

#include "tests/cpp/transport_fixture.h"
#include "util/half.h"

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

template <typename T>
std::span<std::byte> WritableBytes(std::vector<T>& values) {
  return std::as_writable_bytes(std::span<T>(values));
}
template <typename T>
ByteSpan Bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

template <typename T>
TensorView View(std::vector<T>& values, DType dtype) {
  TensorView view;
  view.data = values.data();
  view.dtype = dtype;
  view.shape = {static_cast<int64_t>(values.size())};
  return view;
}

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

template <typename T>
void ExpectSumOfRanks(Transport& transport, DType dtype, const std::function<T(float)>& from) {
  for (const int64_t count : {0, 1, 5, 3000}) {
    std::vector<T> values;
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(from(static_cast<float>(transport.rank() + i % 3)));
    }
    ASSERT_TRUE(transport.AllReduce(View(values, dtype), ReduceOp::kSum, kLong).ok());
    const int size = transport.size();
    for (int64_t i = 0; i < count; ++i) {
      const T expected = from(static_cast<float>(size * (size - 1) / 2 + size * (i % 3)));
      ASSERT_EQ(values[i], expected) << Name(dtype) << " element " << i;
    }
  }
}

TEST_P(TransportContract, AllReduceSumsEveryType) {
  Run([](Transport& t) {
    ExpectSumOfRanks<uint8_t>(t, DType::kUint8, [](float v) { return v; });
    ExpectSumOfRanks<int8_t>(t, DType::kInt8, [](float v) { return v; });
    ExpectSumOfRanks<int16_t>(t, DType::kInt16, [](float v) { return v; });
    ExpectSumOfRanks<int32_t>(t, DType::kInt32, [](float v) { return v; });
    ExpectSumOfRanks<int64_t>(t, DType::kInt64, [](float v) { return v; });
    ExpectSumOfRanks<uint16_t>(t, DType::kFloat16, FloatToHalf);
    ExpectSumOfRanks<uint16_t>(t, DType::kBFloat16, FloatToBFloat16);
    ExpectSumOfRanks<float>(t, DType::kFloat32, [](float v) { return v; });
    ExpectSumOfRanks<double>(t, DType::kFloat64, [](float v) { return v; });
    std::vector<uint8_t> flags = {0, static_cast<uint8_t>(t.rank() == 0), 1};
    ASSERT_TRUE(t.AllReduce(View(flags, DType::kBool), ReduceOp::kSum, kLong).ok());
    EXPECT_EQ(flags, (std::vector<uint8_t>{0, 1, 1}));
  });
}

TEST_P(TransportContract, AllReduceServesEveryOperation) {
  Run([](Transport& transport) {
    const auto reduce = [&](ReduceOp op) {
      std::vector<double> value = {transport.rank() + 1.0};
      EXPECT_TRUE(transport.AllReduce(View(value, DType::kFloat64), op, kLong).ok());
      return value[0];
    };
    const int size = transport.size();
    double factorial = 1;
    for (int i = 2; i <= size; ++i) factorial *= i;
    EXPECT_EQ(reduce(ReduceOp::kSum), size * (size + 1) / 2.0);
    EXPECT_EQ(reduce(ReduceOp::kAverage), (size + 1) / 2.0);
    EXPECT_EQ(reduce(ReduceOp::kMin), 1);
    EXPECT_EQ(reduce(ReduceOp::kMax), size);
    EXPECT_EQ(reduce(ReduceOp::kProduct), factorial);
  });
}

TEST_P(TransportContract, AllGatherTakesUnequalAndEmptyParts) {
  Run([](Transport& transport) {
    std::vector<size_t> counts;
    std::vector<uint8_t> expected;
    for (int rank = 0; rank < transport.size(); ++rank) {
      counts.push_back(static_cast<size_t>(rank) * 3000);  // rank 0 has nothing
      expected.insert(expected.end(), counts.back(), static_cast<uint8_t>(rank + 1));
    }
    const std::vector<uint8_t> mine(counts[transport.rank()],
                                    static_cast<uint8_t>(transport.rank() + 1));
    std::vector<uint8_t> all(expected.size());
    ASSERT_TRUE(transport.AllGatherV(Bytes(mine), counts, WritableBytes(all), kLong).ok());
    EXPECT_EQ(all, expected);
  });
}

TEST_P(TransportContract, AllGatherBlobsKeepsLengths) {
  Run([](Transport& transport) {
    const std::string mine(static_cast<size_t>(transport.rank()) * 7, 'x');
    auto blobs = transport.AllGatherBlobs(std::as_bytes(std::span(mine)), kLong);
    ASSERT_TRUE(blobs.ok());
    ASSERT_EQ(blobs.value().size(), static_cast<size_t>(transport.size()));
    for (int rank = 0; rank < transport.size(); ++rank) {
      EXPECT_EQ(blobs.value()[rank].size(), static_cast<size_t>(rank) * 7);
    }
  });
}

TEST_P(TransportContract, BroadcastFromEveryRoot) {
  Run([](Transport& transport) {
    for (int root = 0; root < transport.size(); ++root) {
      for (const size_t count : {size_t{0}, size_t{1}, size_t{10000}}) {
        std::vector<int> values(count, transport.rank() == root ? root + 40 : -1);
        ASSERT_TRUE(transport.Broadcast(WritableBytes(values), root, kLong).ok());
        EXPECT_EQ(values, std::vector<int>(count, root + 40));
      }
    }
    EXPECT_FALSE(transport.Broadcast({}, transport.size(), kLong).ok());
  });
}

TEST_P(TransportContract, ReduceScatterGivesEachItsUnequalBlock) {
  Run([](Transport& transport) {
    std::vector<int64_t> counts;
    for (int rank = 0; rank < transport.size(); ++rank) counts.push_back(rank * 2);
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    std::vector<float> in(static_cast<size_t>(total));
    std::iota(in.begin(), in.end(), static_cast<float>(transport.rank()));
    std::vector<float> out(static_cast<size_t>(counts[transport.rank()]));
    ASSERT_TRUE(transport
                    .ReduceScatter(View(in, DType::kFloat32), counts, View(out, DType::kFloat32),
                                   ReduceOp::kSum, kLong)
                    .ok());
    const int size = transport.size();
    const int64_t begin =
        std::accumulate(counts.begin(), counts.begin() + transport.rank(), int64_t{0});
    for (size_t i = 0; i < out.size(); ++i) {
      EXPECT_EQ(out[i], static_cast<float>(size * (begin + static_cast<int64_t>(i)) +
                                           size * (size - 1) / 2));
    }
  });
}

TEST_P(TransportContract, AllToAllTakesUnequalAndEmptyParts) {
  Run([](Transport& transport) {
    const int size = transport.size();
    std::vector<size_t> send_counts;
    std::vector<size_t> receive_counts;
    std::vector<uint8_t> in;
    std::vector<uint8_t> expected;
    for (int peer = 0; peer < size; ++peer) {
      send_counts.push_back(static_cast<size_t>((transport.rank() + peer) % 3) * 1000);
      receive_counts.push_back(send_counts.back());
      in.insert(in.end(), send_counts.back(), static_cast<uint8_t>(transport.rank() * 10 + peer));
      expected.insert(expected.end(), send_counts.back(),
                      static_cast<uint8_t>(peer * 10 + transport.rank()));
    }
    std::vector<uint8_t> out(expected.size());
    ASSERT_TRUE(
        transport.AllToAllV(Bytes(in), send_counts, WritableBytes(out), receive_counts, kLong)
            .ok());
    EXPECT_EQ(out, expected);
  });
}

TEST_P(TransportContract, TagsKeepSendsApart) {
  Run([](Transport& transport) {
    const int size = transport.size();
    if (size == 1) return;
    const int next = (transport.rank() + 1) % size;
    const int previous = (transport.rank() + size - 1) % size;
    for (const uint64_t tag : {1, 2}) {
      const std::vector<uint64_t> value = {transport.rank() * 10 + tag};
      ASSERT_TRUE(transport.SendTo(next, tag, Bytes(value), kLong).ok());
    }
    for (const uint64_t tag : {2, 1}) {
      std::vector<uint64_t> value(1);
      ASSERT_TRUE(transport.ReceiveFrom(previous, tag, WritableBytes(value), kLong).ok());
      EXPECT_EQ(value[0], previous * 10 + tag);
    }
  });
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
    for (int peer = 0; peer < transport.size(); ++peer) {
      if (peer == transport.rank()) continue;
      transport.Send(peer, DataHeader(0), BytesOf(std::string(100000, 'x')), nullptr);
      transport.Send(peer, DataHeader(1), {}, nullptr);
    }
    const int64_t peers = transport.size() - 1;
    ASSERT_TRUE(sink.WaitForMessages(static_cast<size_t>(2 * peers)));
    ASSERT_TRUE(transport.Flush(kLong).ok());
    const TransportCounters counters = transport.counters();
    EXPECT_EQ(counters.messages_sent, peers * (at_start + 2));
    EXPECT_EQ(counters.bytes_sent, peers * (at_start * header + 100000 + 2 * header));
    EXPECT_EQ(counters.bytes_received, counters.bytes_sent);
    transport.SetSink(nullptr);
  });
}

}  // namespace
}  // namespace dad
