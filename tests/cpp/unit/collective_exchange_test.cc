// Broadcast, reducescatter, barrier, and which exchange a spec gets.
#include <gtest/gtest.h>

#include <algorithm>

#include "exchange_harness.h"
#include "linalg/reduce.h"

namespace dad {
namespace {

using namespace exchange_test;  // NOLINT: the harness

TEST(BroadcastExchangeTest, AllGetTheRootsBytes) {
  for (int size : {1, 2, 3, 4, 7}) {
    for (int64_t count : {0, 1, 5000}) {
      for (bool in_place : {false, true}) {
        TensorSpec spec = Spec(OpKind::kBroadcast, ReduceOp::kSum, DType::kInt16, {count});
        spec.root = size - 1;
        auto members = MakeMembers(spec, size);
        std::mt19937 random(3);
        std::vector<Tensor> inputs, outputs;
        for (int r = 0; r < size; ++r) {
          inputs.emplace_back(spec.dtype, spec.shape);
          inputs.back().FillRandom(random, -1000, 1000);
          outputs.emplace_back(spec.dtype, spec.shape);
        }
        for (size_t r = 0; r < members.size(); ++r) {
          members[r].mine.input = inputs[r].View();
          members[r].mine.output = in_place ? inputs[r].View() : outputs[r].View();
        }
        const std::vector<std::byte> expected = inputs.back().bytes();
        ExpectAllOk(RunStep(members, spec.dtype));
        for (const Tensor& t : in_place ? inputs : outputs) EXPECT_EQ(t.bytes(), expected);
      }
    }
  }
}

TEST(BroadcastExchangeTest, JoinedRootIsNamedAndJoinedReceiverIsNot) {
  TensorSpec spec = Spec(OpKind::kBroadcast, ReduceOp::kSum, DType::kFloat32, {4});
  spec.root = 1;
  auto members = MakeMembers(spec, 3);
  std::vector<Tensor> tensors(3, Tensor(spec.dtype, spec.shape));
  for (size_t r = 0; r < 3; ++r) {
    members[r].mine.input = members[r].mine.output = tensors[r].View();
  }
  for (const Status& status : RunStep(members, spec.dtype, {false, true, false})) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message().find("root rank 1 has joined"), std::string::npos);
  }
  ExpectAllOk(RunStep(members, spec.dtype, {false, false, true}));
}

TEST(BroadcastExchangeTest, WrongBytesAndWrongRootsAreRejected) {
  TensorSpec spec = Spec(OpKind::kBroadcast, ReduceOp::kSum, DType::kFloat32, {4});
  spec.root = 0;
  auto members = MakeMembers(spec, 2);
  std::vector<Tensor> tensors(2, Tensor(spec.dtype, spec.shape));
  for (size_t r = 0; r < 2; ++r) {
    members[r].mine.input = members[r].mine.output = tensors[r].View();
  }
  for (int bad_sender : {0, 1}) {
    const auto status =
        RunStep(members, spec.dtype, {}, [&](int, int from, int, std::vector<std::byte>& bytes) {
          if (from == bad_sender) bytes.resize(bytes.size() + 1);
        });
    EXPECT_EQ(status[static_cast<size_t>(1 - bad_sender)].code(), StatusCode::kInvalidArgument);
  }
  spec.root = 2;
  auto outside = MakeMembers(spec, 1);
  outside[0].mine = members[0].mine;
  EXPECT_EQ(RunStep(outside, spec.dtype)[0].code(), StatusCode::kInvalidArgument);
}

TEST(ReduceScatterExchangeTest, LowestRanksGetTheRemainder) {
  for (DType dtype : AllDTypes()) {
    for (int size : {1, 2, 3, 4, 7}) {
      for (int64_t rows : {0, 2, 10}) {
        for (const auto& joined : {std::vector<bool>{}, std::vector<bool>(7, false)}) {
          std::vector<bool> who(joined.begin(), joined.begin() + (joined.empty() ? 0 : size));
          if (size > 1 && !who.empty()) who[1] = true;
          TensorSpec spec = Spec(OpKind::kReduceScatter, ReduceOp::kAverage, dtype, {rows, 3});
          auto members = MakeMembers(spec, size);
          std::mt19937 random(5);
          std::vector<Tensor> inputs;
          for (int r = 0; r < size; ++r) {
            inputs.emplace_back(dtype, spec.shape);
            inputs.back().FillRandom(random, 0, 10);
          }
          std::vector<const void*> pointers;
          for (size_t r = 0; r < members.size(); ++r) {
            members[r].mine.input = inputs[r].View();
            pointers.push_back(!who.empty() && who[r] ? nullptr : inputs[r].View().data);
          }
          Tensor whole(dtype, spec.shape);
          ReduceInRankOrder(pointers, whole.View().data, whole.size(), dtype, spec.op, 1, 1, size);
          ExpectAllOk(RunStep(members, dtype, who));
          size_t at = 0;
          for (int r = 0; r < size; ++r) {
            const int64_t expected_rows = rows / size + (r < rows % size ? 1 : 0);
            const size_t num_bytes = static_cast<size_t>(expected_rows) * 3 * SizeOf(dtype);
            if (who.empty() || !who[static_cast<size_t>(r)]) {
              const Tensor& got = members[static_cast<size_t>(r)].allocated;
              EXPECT_EQ(got.shape(), (Shape{expected_rows, 3}));
              ASSERT_EQ(got.bytes().size(), num_bytes);
              EXPECT_TRUE(std::equal(got.bytes().begin(), got.bytes().end(),
                                     whole.bytes().begin() + static_cast<int64_t>(at)));
            }
            at += num_bytes;
          }
        }
      }
    }
  }
}

TEST(ReduceScatterExchangeTest, TruncatedShareIsRejected) {
  const TensorSpec spec = Spec(OpKind::kReduceScatter, ReduceOp::kSum, DType::kFloat32, {5, 2});
  auto members = MakeMembers(spec, 2);
  std::vector<Tensor> inputs(2, Tensor(spec.dtype, spec.shape));
  for (size_t r = 0; r < 2; ++r) members[r].mine.input = inputs[r].View();
  const auto status =
      RunStep(members, spec.dtype, {}, [](int, int from, int, std::vector<std::byte>& bytes) {
        if (from == 1) bytes.pop_back();
      });
  EXPECT_EQ(status[0].code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status[0].message().find("\"fc1.weight\": rank 1"), std::string::npos);
}

TEST(BarrierExchangeTest, IsOneRoundWithoutBytes) {
  const TensorSpec spec = Spec(OpKind::kBarrier, ReduceOp::kSum, DType::kFloat32, {});
  for (int size : {1, 2, 7}) {
    auto members = MakeMembers(spec, size);
    ExpectAllOk(RunStep(members, spec.dtype));
    EXPECT_EQ(members[0].exchange->num_rounds(), 1);
  }
}

TEST(FactoryTest, ElementwiseIsDenseAllreduceOnly) {
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat32, {3});
  EXPECT_TRUE(IsElementwise(spec));
  spec.op = ReduceOp::kAdasum;
  EXPECT_FALSE(IsElementwise(spec));
  spec.op = ReduceOp::kSum;
  spec.method = "other";
  EXPECT_FALSE(IsElementwise(spec));
  EXPECT_FALSE(IsElementwise(Spec(OpKind::kReduceScatter, ReduceOp::kSum, DType::kFloat32, {3})));
}

TEST(FactoryTest, WhatCannotBeIsRefusedByName) {
  TensorSpec method = Spec(OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, {3});
  method.method = "magic";
  const TensorSpec adasum = Spec(OpKind::kAllReduce, ReduceOp::kAdasum, DType::kInt32, {3});
  const TensorSpec scalar = Spec(OpKind::kReduceScatter, ReduceOp::kSum, DType::kFloat32, {});
  const TensorSpec scattered =
      Spec(OpKind::kReduceScatter, ReduceOp::kAdasum, DType::kFloat32, {4});
  const TensorSpec join = Spec(OpKind::kJoin, ReduceOp::kSum, DType::kFloat32, {});
  for (const TensorSpec& spec : {method, adasum, scalar, scattered, join}) {
    const auto exchange = MakeExchange(spec, {}, 1, {});
    EXPECT_EQ(exchange.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(exchange.status().message().find("fc1.weight"), std::string::npos);
  }
  EXPECT_NE(MakeExchange(method, {}, 1, {}).status().message().find("magic"), std::string::npos);
}

}  // namespace
}  // namespace dad
