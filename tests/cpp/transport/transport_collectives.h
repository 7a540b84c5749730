// What every transport promises of its blocking collectives. All ranks call a check; `scale`
// multiplies the large sizes, for backends that move large payloads in another way.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "tests/cpp/transport/transport_fixture.h"
#include "util/half.h"

namespace dad {

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
void ExpectSumOfRanks(Transport& t, int64_t scale, DType dtype,
                      const std::function<T(float)>& from) {
  for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{5}, 3000 * scale}) {
    std::vector<T> values;
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(from(static_cast<float>(t.rank() + i % 3)));
    }
    ASSERT_TRUE(t.AllReduce(View(values, dtype), ReduceOp::kSum, kLong).ok());
    for (int64_t i = 0; i < count; ++i) {
      const T expected =
          from(static_cast<float>(t.size() * (t.size() - 1) / 2 + t.size() * (i % 3)));
      ASSERT_EQ(values[i], expected) << Name(dtype) << " element " << i;
    }
  }
}

inline void CheckAllReduceOfEveryType(Transport& t, int64_t scale) {
  ExpectSumOfRanks<uint8_t>(t, scale, DType::kUint8, [](float v) { return v; });
  ExpectSumOfRanks<int8_t>(t, scale, DType::kInt8, [](float v) { return v; });
  ExpectSumOfRanks<int16_t>(t, scale, DType::kInt16, [](float v) { return v; });
  ExpectSumOfRanks<uint16_t>(t, scale, DType::kUint16, [](float v) { return v; });
  ExpectSumOfRanks<int32_t>(t, scale, DType::kInt32, [](float v) { return v; });
  ExpectSumOfRanks<int64_t>(t, scale, DType::kInt64, [](float v) { return v; });
  ExpectSumOfRanks<uint16_t>(t, scale, DType::kFloat16, FloatToHalf);
  ExpectSumOfRanks<uint16_t>(t, scale, DType::kBFloat16, FloatToBFloat16);
  ExpectSumOfRanks<float>(t, scale, DType::kFloat32, [](float v) { return v; });
  ExpectSumOfRanks<double>(t, scale, DType::kFloat64, [](float v) { return v; });
  std::vector<uint8_t> flags = {0, static_cast<uint8_t>(t.rank() == 0), 1};
  ASSERT_TRUE(t.AllReduce(View(flags, DType::kBool), ReduceOp::kSum, kLong).ok());
  EXPECT_EQ(flags, (std::vector<uint8_t>{0, 1, 1}));
}

inline void CheckAllReduceWithEveryOperation(Transport& t, int64_t scale) {
  const auto reduce = [&](ReduceOp op) {
    std::vector<double> values(static_cast<size_t>(300 * scale), t.rank() + 1.0);
    EXPECT_TRUE(t.AllReduce(View(values, DType::kFloat64), op, kLong).ok());
    return values.back();
  };
  double factorial = 1;
  for (int i = 2; i <= t.size(); ++i) factorial *= i;
  EXPECT_EQ(reduce(ReduceOp::kSum), t.size() * (t.size() + 1) / 2.0);
  EXPECT_EQ(reduce(ReduceOp::kAverage), (t.size() + 1) / 2.0);
  EXPECT_EQ(reduce(ReduceOp::kMin), 1);
  EXPECT_EQ(reduce(ReduceOp::kMax), t.size());
  EXPECT_EQ(reduce(ReduceOp::kProduct), factorial);
}

inline void CheckAllGatherOfUnequalParts(Transport& t, int64_t scale) {
  std::vector<size_t> counts;
  std::vector<uint8_t> expected;
  for (int rank = 0; rank < t.size(); ++rank) {
    counts.push_back(static_cast<size_t>(rank * 3000 * scale));  // rank 0 has nothing
    expected.insert(expected.end(), counts.back(), static_cast<uint8_t>(rank + 1));
  }
  const std::vector<uint8_t> mine(counts[t.rank()], static_cast<uint8_t>(t.rank() + 1));
  std::vector<uint8_t> all(expected.size());
  ASSERT_TRUE(t.AllGatherV(Bytes(mine), counts, WritableBytes(all), kLong).ok());
  EXPECT_EQ(all, expected);
}

inline void CheckAllGatherOfBlobs(Transport& t, int64_t scale) {
  const auto length = [&](int rank) { return static_cast<size_t>(rank * 2000 * scale); };
  const std::string mine(length(t.rank()), 'x');
  auto blobs = t.AllGatherBlobs(std::as_bytes(std::span(mine)), kLong);
  ASSERT_TRUE(blobs.ok());
  ASSERT_EQ(blobs.value().size(), static_cast<size_t>(t.size()));
  for (int rank = 0; rank < t.size(); ++rank) {
    EXPECT_EQ(blobs.value()[rank].size(), length(rank));
  }
}

inline void CheckBroadcastFromEveryRoot(Transport& t, int64_t scale) {
  for (int root = 0; root < t.size(); ++root) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, 10'000 * scale}) {
      std::vector<int> values(static_cast<size_t>(count), t.rank() == root ? root + 40 : -1);
      ASSERT_TRUE(t.Broadcast(WritableBytes(values), root, kLong).ok());
      EXPECT_EQ(values, std::vector<int>(static_cast<size_t>(count), root + 40));
    }
  }
  EXPECT_FALSE(t.Broadcast({}, t.size(), kLong).ok());
}

inline void CheckReduceScatterOfUnequalBlocks(Transport& t, int64_t scale) {
  for (const int64_t rows : {int64_t{2}, 600 * scale}) {
    std::vector<int64_t> counts;
    for (int rank = 0; rank < t.size(); ++rank) counts.push_back(rank * rows);
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    std::vector<double> in(static_cast<size_t>(total));
    std::iota(in.begin(), in.end(), static_cast<double>(t.rank()));
    std::vector<double> out(static_cast<size_t>(counts[t.rank()]));
    ASSERT_TRUE(t.ReduceScatter(View(in, DType::kFloat64), counts, View(out, DType::kFloat64),
                                ReduceOp::kSum, kLong)
                    .ok());
    const int64_t begin = std::accumulate(counts.begin(), counts.begin() + t.rank(), int64_t{0});
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], static_cast<double>(t.size() * (begin + static_cast<int64_t>(i)) +
                                            t.size() * (t.size() - 1) / 2));
    }
  }
}

inline void CheckAllToAllOfUnequalParts(Transport& t, int64_t scale) {
  std::vector<size_t> counts;
  std::vector<uint8_t> in;
  std::vector<uint8_t> expected;
  for (int peer = 0; peer < t.size(); ++peer) {
    counts.push_back(static_cast<size_t>((t.rank() + peer) % 3 * 1000 * scale));
    in.insert(in.end(), counts.back(), static_cast<uint8_t>(t.rank() * 10 + peer));
    expected.insert(expected.end(), counts.back(), static_cast<uint8_t>(peer * 10 + t.rank()));
  }
  std::vector<uint8_t> out(expected.size());
  ASSERT_TRUE(t.AllToAllV(Bytes(in), counts, WritableBytes(out), counts, kLong).ok());
  EXPECT_EQ(out, expected);
}

inline void CheckThatTagsKeepSendsApart(Transport& t, int64_t scale) {
  if (t.size() == 1) return;
  const int next = (t.rank() + 1) % t.size();
  const int previous = (t.rank() + t.size() - 1) % t.size();
  const auto values_of = [&](int rank, uint64_t tag) {
    const size_t count = tag * static_cast<size_t>(600 * scale);
    return std::vector<uint64_t>(count, static_cast<uint64_t>(rank) * 10 + tag);
  };
  for (const uint64_t tag : {1, 2}) {
    ASSERT_TRUE(t.SendTo(next, tag, Bytes(values_of(t.rank(), tag)), kLong).ok());
  }
  for (const uint64_t tag : {2, 1}) {
    const std::vector<uint64_t> expected = values_of(previous, tag);
    std::vector<uint64_t> values(expected.size());
    ASSERT_TRUE(t.ReceiveFrom(previous, tag, WritableBytes(values), kLong).ok());
    EXPECT_EQ(values, expected);
  }
}

}  // namespace dad
