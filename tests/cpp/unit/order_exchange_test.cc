// What the ranks tell each other before devices move data: whose turn it is, how many rows come,
// and who has no memory for them.
#include <gtest/gtest.h>

#include "exchange/collective/order.h"
#include "exchange_harness.h"

namespace dad::exchange_test {
namespace {

struct Job {
  Job(OpKind kind, const std::vector<Shape>& shapes)
      : inputs(shapes.size()), members(shapes.size()) {
    for (size_t r = 0; r < shapes.size(); ++r) {
      TensorSpec spec;
      spec.name = "t";
      spec.kind = kind;
      spec.shape = shapes[r];
      spec.on_device = true;
      ExchangeEnv env;
      env.next_turn = &next_turn;
      inputs[r] = Tensor(DType::kFloat32, shapes[r]);
      members[r].mine.input = members[r].mine.output = inputs[r].View();
      members[r].exchange = MakeOrderExchange(spec, env);
    }
  }
  const DeviceTurn& Turn(size_t rank) const { return *members[rank].exchange->device_turn(); }
  void ExpectOk(const std::vector<bool>& joined = {}) {
    for (const Status& status : RunStep(members, DType::kFloat32, joined)) {
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
  }

  uint64_t next_turn = 7;
  std::vector<Tensor> inputs;
  std::vector<Member> members;
};

TEST(OrderExchangeTest, TheFirstMemberGivesTheNumberAndAllHaveTheSame) {
  Job job(OpKind::kAllReduce, {{3}, {3}, {3}});
  for (const uint64_t wanted : {7u, 8u}) {
    job.ExpectOk();
    for (size_t r = 0; r < 3; ++r) EXPECT_EQ(job.Turn(r).number, wanted);
  }
}

TEST(OrderExchangeTest, RowsOfAnAllGatherAreToldAndPlaced) {
  Job job(OpKind::kAllGather, {{2, 4}, {0, 4}, {5, 4}});
  job.ExpectOk();
  for (size_t r = 0; r < 3; ++r) {
    const DeviceTurn& turn = job.Turn(r);
    EXPECT_EQ(job.members[r].allocated.shape(), (Shape{7, 4}));
    EXPECT_EQ(turn.rows[2].receive_begin, 2);
    EXPECT_EQ(turn.rows[2].receive_count, 5);
    EXPECT_EQ(turn.rows[0].send_count, job.inputs[r].shape()[0]);
    EXPECT_FALSE(turn.failed);
  }
}

TEST(OrderExchangeTest, RowsOfAnAllToAllAreThoseOfTheSplits) {
  Job job(OpKind::kAllToAll, {{3}, {2}});
  job.members[0].mine.splits = {1, 2};
  job.members[1].mine.splits = {2, 0};
  job.ExpectOk();
  EXPECT_EQ(job.members[0].received_splits, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(job.members[1].received_splits, (std::vector<int64_t>{2, 0}));
  EXPECT_EQ(job.Turn(0).rows[1].send_begin, 1);
  EXPECT_EQ(job.Turn(0).rows[1].receive_begin, 1);
}

TEST(OrderExchangeTest, AJoinedRankNeitherSendsRowsNorGetsAny) {
  Job job(OpKind::kAllToAll, {{3}, {3}, {3}});
  job.ExpectOk({false, true, false});
  EXPECT_EQ(job.Turn(0).rows[1].send_count, 0);
  EXPECT_EQ(job.Turn(0).rows[2].send_begin, 2);  // the row between is left out
  EXPECT_EQ(job.members[0].received_splits, (std::vector<int64_t>{1, 0, 1}));
  EXPECT_EQ(job.Turn(1).number, job.Turn(0).number);
}

TEST(OrderExchangeTest, ARankWithoutMemoryIsNamedOnAllAndTheTurnPasses) {
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kReduceScatter}) {
    Job job(kind, {{4}, {4}, {4}});
    const auto tamper = [](int round, int from, int, std::vector<std::byte>& bytes) {
      if (round == 1 && from == 2) bytes.back() = std::byte{0};
    };
    const std::vector<Status> status = RunStep(job.members, DType::kFloat32, {}, tamper);
    for (const size_t r : {size_t{0}, size_t{1}}) {
      EXPECT_EQ(status[r].code(), StatusCode::kUnavailable) << status[r].ToString();
      EXPECT_NE(status[r].message().find("rank 2"), std::string::npos);
      EXPECT_TRUE(job.Turn(r).failed);
      EXPECT_EQ(job.Turn(r).number, 7u);
    }
    job.ExpectOk();
    EXPECT_FALSE(job.Turn(0).failed);
    EXPECT_EQ(job.Turn(0).number, 8u);
  }
}

TEST(OrderExchangeTest, WrongBytesAndImpossibleRowsAreRejected) {
  for (const int wrong_round : {0, 1}) {
    Job job(OpKind::kAllGather, {{4}, {4}});
    const auto shorten = [&](int round, int from, int, std::vector<std::byte>& bytes) {
      if (round == wrong_round && from == 0) bytes.pop_back();
    };
    EXPECT_EQ(RunStep(job.members, DType::kFloat32, {}, shorten)[1].code(),
              StatusCode::kInvalidArgument);
  }
  for (const int64_t rows : {int64_t{-1}, int64_t{1} << 60}) {
    Job job(OpKind::kAllGather, {{4}, {4}});
    const auto change = [&](int round, int from, int, std::vector<std::byte>& bytes) {
      if (round == 0 && from == 0) std::memcpy(bytes.data(), &rows, sizeof rows);
    };
    EXPECT_EQ(RunStep(job.members, DType::kFloat32, {}, change)[1].code(),
              StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace dad::exchange_test
