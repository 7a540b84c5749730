// Allgather and alltoall: exchanges whose rows only the sender can count.
#include <gtest/gtest.h>

#include <numeric>

#include "exchange_harness.h"

namespace dad {
namespace {

using namespace exchange_test;  // NOLINT: the harness

constexpr DType kF32 = DType::kFloat32;

// Rows of `width` floats; rank r's row i is r, i, r, i ...
Tensor MarkedRows(int rank, int64_t rows, int64_t width) {
  Tensor t(kF32, {rows, width});
  for (int64_t i = 0; i < rows * width; ++i) {
    t.Set(i, 1000.0 * rank + static_cast<double>(i / width));
  }
  return t;
}

int64_t RowsOfRank(int r) { return (r * 5) % 7; }  // 0, 5, 3, 1, 6, 4, 2

// Each rank has a spec of its own: the first dimension is not agreed on.
std::vector<Member> MakeRowMembers(OpKind kind, std::vector<Tensor>& inputs) {
  std::vector<Member> members(inputs.size());
  for (size_t r = 0; r < inputs.size(); ++r) {
    const TensorSpec spec = Spec(kind, ReduceOp::kSum, kF32, inputs[r].shape());
    members[r].exchange = MakeExchange(spec, {}, 1, {}).value();
    members[r].mine.input = inputs[r].View();
  }
  return members;
}

TEST(GatherExchangeTest, UnequalRowsComeInRankOrder) {
  for (int size : {1, 2, 3, 4, 7}) {
    for (int64_t width : {0, 1, 3, 1000}) {
      std::vector<Tensor> inputs;
      std::vector<std::byte> expected;
      int64_t rows = 0;
      for (int r = 0; r < size; ++r) {
        inputs.push_back(MarkedRows(r, RowsOfRank(r), width));
        expected.insert(expected.end(), inputs.back().bytes().begin(), inputs.back().bytes().end());
        rows += RowsOfRank(r);
      }
      auto members = MakeRowMembers(OpKind::kAllGather, inputs);
      ExpectAllOk(RunStep(members, kF32));
      for (const Member& member : members) {
        EXPECT_EQ(member.allocated.shape(), (Shape{rows, width}));
        EXPECT_EQ(member.allocated.bytes(), expected);
      }
    }
  }
}

TEST(GatherExchangeTest, JoinedRanksHaveNoRows) {
  std::vector<Tensor> inputs;
  for (int r = 0; r < 3; ++r) inputs.push_back(MarkedRows(r, 2, 2));
  auto members = MakeRowMembers(OpKind::kAllGather, inputs);
  ExpectAllOk(RunStep(members, kF32, {false, true, false}));
  EXPECT_EQ(members[0].allocated.shape(), (Shape{4, 2}));
  EXPECT_EQ(members[0].allocated.At(4), 2000);
  EXPECT_EQ(members[2].allocated.bytes(), members[0].allocated.bytes());
  EXPECT_EQ(members[1].allocated.size(), 1);  // never asked for: still the default
}

TEST(GatherExchangeTest, TensorWithoutDimensionsIsOneRow) {
  std::vector<Tensor> inputs;
  for (int r = 0; r < 3; ++r) {
    inputs.emplace_back(kF32, Shape{});
    inputs.back().Set(0, r);
  }
  auto members = MakeRowMembers(OpKind::kAllGather, inputs);
  ExpectAllOk(RunStep(members, kF32));
  EXPECT_EQ(members[1].allocated.shape(), Shape{3});
  EXPECT_EQ(members[1].allocated.At(2), 2);
}

TEST(GatherExchangeTest, AFailedAllocationIsThisRanksError) {
  Tensor input = MarkedRows(0, 1, 1);
  std::vector<Tensor> inputs = {input};
  auto members = MakeRowMembers(OpKind::kAllGather, inputs);
  StepInput step;
  step.mine = &members[0].mine;
  step.allocate = [](const Shape&) -> Result<TensorView> { return Status::Unavailable("full"); };
  ASSERT_TRUE(members[0].exchange->Begin(step, {}).ok());
  const ByteSpan shares[1] = {};
  EXPECT_EQ(members[0].exchange->Receive(0, shares).code(), StatusCode::kUnavailable);
}

// What rank 1 sends to rank 0 is changed by `tamper`; rank 0 must name tensor and rank.
void ExpectRejected(OpKind kind, std::function<void(std::vector<std::byte>&)> tamper) {
  std::vector<Tensor> inputs;
  for (int r = 0; r < 2; ++r) inputs.push_back(MarkedRows(r, 4, 3));
  auto members = MakeRowMembers(kind, inputs);
  const auto status =
      RunStep(members, kF32, {}, [&](int, int from, int, std::vector<std::byte>& bytes) {
        if (from == 1) tamper(bytes);
      });
  EXPECT_EQ(status[0].code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status[0].message().find("\"fc1.weight\": rank 1"), std::string::npos)
      << status[0].message();
  EXPECT_TRUE(status[1].ok());
}

TEST(RowsTest, MalformedSharesAreRejected) {
  const auto set_count = [](std::vector<std::byte>& bytes, int64_t count) {
    std::memcpy(bytes.data(), &count, sizeof count);
  };
  for (OpKind kind : {OpKind::kAllGather, OpKind::kAllToAll}) {
    ExpectRejected(kind, [](auto& bytes) { bytes.clear(); });
    ExpectRejected(kind, [](auto& bytes) { bytes.resize(7); });
    ExpectRejected(kind, [](auto& bytes) { bytes.pop_back(); });
    ExpectRejected(kind, [](auto& bytes) { bytes.resize(bytes.size() + 12); });
    ExpectRejected(kind, [&](auto& bytes) { set_count(bytes, -1); });
    ExpectRejected(kind, [&](auto& bytes) { set_count(bytes, 5); });
    ExpectRejected(kind, [&](auto& bytes) { set_count(bytes, int64_t{1} << 62); });
  }
}

TEST(AllToAllExchangeTest, SplitsGoWhereTheySay) {
  for (int size : {1, 2, 3, 4, 7}) {
    std::vector<Tensor> inputs;
    std::vector<std::vector<int64_t>> splits(static_cast<size_t>(size));
    for (int r = 0; r < size; ++r) {
      int64_t rows = 0;
      for (int p = 0; p < size; ++p) {
        splits[static_cast<size_t>(r)].push_back((r + 2 * p) % 4);
        rows += (r + 2 * p) % 4;
      }
      inputs.push_back(MarkedRows(r, rows, 2));
    }
    auto members = MakeRowMembers(OpKind::kAllToAll, inputs);
    for (size_t r = 0; r < members.size(); ++r) members[r].mine.splits = splits[r];
    ExpectAllOk(RunStep(members, kF32));
    for (int p = 0; p < size; ++p) {
      const Member& member = members[static_cast<size_t>(p)];
      int64_t at = 0;
      for (int r = 0; r < size; ++r) {
        const auto& from = splits[static_cast<size_t>(r)];
        const int64_t count = from[static_cast<size_t>(p)];
        EXPECT_EQ(member.received_splits[static_cast<size_t>(r)], count);
        const int64_t first = std::accumulate(from.begin(), from.begin() + p, int64_t{0});
        for (int64_t i = 0; i < count; ++i, ++at) {
          EXPECT_EQ(member.allocated.At(2 * at), 1000.0 * r + static_cast<double>(first + i));
        }
      }
      EXPECT_EQ(member.allocated.shape(), (Shape{at, 2}));
    }
  }
}

TEST(AllToAllExchangeTest, NoSplitsMeansEven) {
  std::vector<Tensor> inputs;
  for (int r = 0; r < 3; ++r) inputs.push_back(MarkedRows(r, 6, 1));
  auto members = MakeRowMembers(OpKind::kAllToAll, inputs);
  ExpectAllOk(RunStep(members, kF32));
  EXPECT_EQ(members[1].received_splits, (std::vector<int64_t>{2, 2, 2}));
  for (int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(members[1].allocated.At(i), 1000.0 * static_cast<double>(i / 2) + 2 + (i % 2));
  }
}

TEST(AllToAllExchangeTest, JoinedRanksSendAndGetNoRows) {
  std::vector<Tensor> inputs;
  for (int r = 0; r < 3; ++r) inputs.push_back(MarkedRows(r, 3, 1));
  auto members = MakeRowMembers(OpKind::kAllToAll, inputs);
  ExpectAllOk(RunStep(members, kF32, {false, false, true}));
  EXPECT_EQ(members[0].received_splits, (std::vector<int64_t>{1, 1, 0}));
  EXPECT_EQ(members[0].allocated.shape(), (Shape{2, 1}));
}

TEST(AllToAllExchangeTest, SplitsThatDoNotAddUpAreRefused) {
  const std::vector<std::vector<int64_t>> bad = {{1, 1}, {4, 4}, {-1, 5}, {4}, {}};
  for (const auto& splits : bad) {
    std::vector<Tensor> inputs;
    // Four rows cannot be split evenly over three.
    for (int r = 0; r < (splits.empty() ? 3 : 2); ++r) inputs.push_back(MarkedRows(r, 4, 1));
    auto members = MakeRowMembers(OpKind::kAllToAll, inputs);
    members[0].mine.splits = splits;
    const auto status = RunStep(members, kF32);
    EXPECT_EQ(status[0].code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status[0].message().find("fc1.weight"), std::string::npos);
  }
}

}  // namespace
}  // namespace dad
