// The blocking collectives, with payloads that go over the control connection and ones
// that go by MPI.
#include <functional>
#include <numeric>
#include <vector>

#include "dad/plugins.h"
#include "tests/cpp/mpi/rank_fixture.h"
#include "util/half.h"

namespace dad {
namespace {

class MpiCollectives : public RankFixture {
 protected:
  void TearDown() override { EXPECT_TRUE(transport_->Flush(kLong).ok()); }
  std::unique_ptr<Transport> transport_ = Connect();
};

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

template <typename T>
void ExpectSumOfRanks(Transport& transport, DType dtype, const std::function<T(float)>& from) {
  for (const int64_t count : {0, 1, 3000, 100'000}) {
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

TEST_F(MpiCollectives, AllReduceSumsEveryType) {
  Transport& t = *transport_;
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
}

TEST_F(MpiCollectives, AllReduceServesEveryOperation) {
  const auto reduce = [&](ReduceOp op) {
    std::vector<double> value(10'000, rank() + 1.0);
    EXPECT_TRUE(transport_->AllReduce(View(value, DType::kFloat64), op, kLong).ok());
    return value.back();
  };
  double factorial = 1;
  for (int i = 2; i <= size(); ++i) factorial *= i;
  EXPECT_EQ(reduce(ReduceOp::kSum), size() * (size() + 1) / 2.0);
  EXPECT_EQ(reduce(ReduceOp::kAverage), (size() + 1) / 2.0);
  EXPECT_EQ(reduce(ReduceOp::kMin), 1);
  EXPECT_EQ(reduce(ReduceOp::kMax), size());
  EXPECT_EQ(reduce(ReduceOp::kProduct), factorial);
}

TEST_F(MpiCollectives, AllGatherTakesUnequalAndEmptyParts) {
  std::vector<size_t> counts;
  std::vector<uint8_t> expected;
  for (int i = 0; i < size(); ++i) {
    counts.push_back(static_cast<size_t>(i) * 50'000);  // rank 0 has nothing
    expected.insert(expected.end(), counts.back(), static_cast<uint8_t>(i + 1));
  }
  const std::vector<uint8_t> mine(counts[rank()], static_cast<uint8_t>(rank() + 1));
  std::vector<uint8_t> all(expected.size());
  ASSERT_TRUE(transport_->AllGatherV(Bytes(mine), counts, WritableBytes(all), kLong).ok());
  EXPECT_EQ(all, expected);
}

TEST_F(MpiCollectives, AllGatherBlobsKeepsLengths) {
  const std::string mine(static_cast<size_t>(rank()) * 70'000, 'x');
  auto blobs = transport_->AllGatherBlobs(std::as_bytes(std::span(mine)), kLong);
  ASSERT_TRUE(blobs.ok());
  for (int i = 0; i < size(); ++i) {
    EXPECT_EQ(blobs.value()[i].size(), static_cast<size_t>(i) * 70'000);
  }
}

TEST_F(MpiCollectives, BroadcastFromEveryRoot) {
  for (int root = 0; root < size(); ++root) {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{1'000'000}}) {
      std::vector<int> values(count, rank() == root ? root + 40 : -1);
      ASSERT_TRUE(transport_->Broadcast(WritableBytes(values), root, kLong).ok());
      EXPECT_EQ(values, std::vector<int>(count, root + 40));
    }
  }
}

TEST_F(MpiCollectives, ReduceScatterGivesEachItsUnequalBlock) {
  for (const int64_t scale : {2, 20'000}) {
    std::vector<int64_t> counts;
    for (int i = 0; i < size(); ++i) counts.push_back(i * scale);
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    std::vector<double> in(static_cast<size_t>(total));
    std::iota(in.begin(), in.end(), static_cast<double>(rank()));
    std::vector<double> out(static_cast<size_t>(counts[rank()]));
    ASSERT_TRUE(transport_
                    ->ReduceScatter(View(in, DType::kFloat64), counts, View(out, DType::kFloat64),
                                    ReduceOp::kSum, kLong)
                    .ok());
    const int64_t begin = std::accumulate(counts.begin(), counts.begin() + rank(), int64_t{0});
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], static_cast<double>(size() * (begin + static_cast<int64_t>(i)) +
                                            size() * (size() - 1) / 2));
    }
  }
}

TEST_F(MpiCollectives, AllToAllTakesUnequalAndEmptyParts) {
  std::vector<size_t> counts;
  std::vector<uint8_t> in;
  std::vector<uint8_t> expected;
  for (int peer = 0; peer < size(); ++peer) {
    counts.push_back(static_cast<size_t>((rank() + peer) % 3) * 60'000);
    in.insert(in.end(), counts.back(), static_cast<uint8_t>(rank() * 10 + peer));
    expected.insert(expected.end(), counts.back(), static_cast<uint8_t>(peer * 10 + rank()));
  }
  std::vector<uint8_t> out(expected.size());
  ASSERT_TRUE(transport_->AllToAllV(Bytes(in), counts, WritableBytes(out), counts, kLong).ok());
  EXPECT_EQ(out, expected);
}

TEST_F(MpiCollectives, TagsKeepSendsApart) {
  if (size() == 1) return;
  const int next = (rank() + 1) % size();
  const int previous = (rank() + size() - 1) % size();
  for (const uint64_t tag : {1, 2}) {
    const std::vector<uint64_t> values(tag * 20'000, rank() * 10 + tag);
    ASSERT_TRUE(transport_->SendTo(next, tag, Bytes(values), kLong).ok());
  }
  for (const uint64_t tag : {2, 1}) {
    std::vector<uint64_t> values(tag * 20'000);
    ASSERT_TRUE(transport_->ReceiveFrom(previous, tag, WritableBytes(values), kLong).ok());
    EXPECT_EQ(values, std::vector<uint64_t>(tag * 20'000, previous * 10 + tag));
  }
}

TEST_F(MpiCollectives, BarrierAfterBarrier) {
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(transport_->Barrier(kLong).ok());
}

TEST_F(MpiCollectives, EveryRankGetsTheTextOfRankZero) {
  const std::string mine = "text of rank " + std::to_string(rank());
  Result<std::string> text = MpiBootstrap(mine, DAD_PLUGIN_DIR);
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  EXPECT_EQ(text.value(), "text of rank 0");
}

}  // namespace
}  // namespace dad
