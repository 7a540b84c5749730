#include "runtime/lane/validate.h"

#include <gtest/gtest.h>

#include "tests/cpp/engine/engine_fixture.h"

namespace dad {
namespace {

class ValidateTest : public testing::Test {
 protected:
  // Of rank 0 in a process set of ranks 0, 1 and 3, in a job of 4.
  static std::string Check(const Request& request, int rank = 0) {
    const std::vector<int> ranks = {0, 1, 3};
    return Validate(request, rank, ranks, 4).message();
  }
  Request Sum(const std::function<void(Request&)>& change = [](Request&) {}) {
    Request request = values_.AllReduce("x");
    change(request);
    return request;
  }
  Request AllToAll(std::vector<int64_t> splits, Shape shape = {6}) {
    Request request = values_.AllReduce("x");
    request.kind = OpKind::kAllToAll;
    request.tensors[0].input.shape = std::move(shape);
    request.tensors[0].splits = std::move(splits);
    return request;
  }

  Values values_{std::vector<float>(6)};
};

TEST_F(ValidateTest, WhatIsRightPasses) {
  EXPECT_EQ(Check(Sum()), "");
  EXPECT_EQ(Check(values_.AllGather("x")), "");
  EXPECT_EQ(Check(values_.Broadcast("x", 3)), "");
  EXPECT_EQ(Check(AllToAll({})), "");
  EXPECT_EQ(Check(AllToAll({0, 6, 0})), "");
  EXPECT_EQ(Check(Bare(OpKind::kBarrier, "b")), "");
  EXPECT_EQ(Check(Bare(OpKind::kJoin, "j")), "");
  EXPECT_EQ(Check(Bare(OpKind::kAddProcessSet, "s", {3, 0})), "");
  EXPECT_EQ(Check(Bare(OpKind::kRemoveProcessSet, "s", {1})), "");
}

TEST_F(ValidateTest, ARequestNeedsANameATensorAndAPlaceInItsSet) {
  EXPECT_EQ(Check(Sum([](Request& r) { r.name.clear(); })),
            "allreduce \"\": a request needs a name");
  EXPECT_EQ(Check(Sum([](Request& r) { r.tensors.clear(); })), "allreduce \"x\": no tensor given");
  EXPECT_EQ(Check(Sum([](Request& r) { r.process_set = 7; }), /*rank=*/2),
            "allreduce \"x\": rank 2 is not in process set 7");
  EXPECT_EQ(Validate(Sum([](Request& r) { r.process_set = 7; }), 0, {}, 4).message(),
            "allreduce \"x\": there is no process set 7");
}

TEST_F(ValidateTest, TheRootOfABroadcastIsAMember) {
  EXPECT_EQ(Check(values_.Broadcast("x", 2)),
            "broadcast \"x\": root rank 2 is not among the ranks of the process set");
}

TEST_F(ValidateTest, SplitsAddUpToTheRows) {
  EXPECT_EQ(Check(AllToAll({}, {5})),
            "alltoall \"x\": 5 rows cannot be divided evenly among 3 ranks; give splits");
  EXPECT_EQ(Check(AllToAll({3, 3})), "alltoall \"x\": expected 3 splits, got 2");
  EXPECT_EQ(Check(AllToAll({7, -1, 0})), "alltoall \"x\": splits must not be negative");
  EXPECT_EQ(Check(AllToAll({1, 1, 1})),
            "alltoall \"x\": splits add up to 3, the tensor has 6 rows");
  EXPECT_EQ(Check(AllToAll({}, {})), "alltoall \"x\": a tensor without dimensions has no rows");
}

TEST_F(ValidateTest, ProcessSetsHaveRanksOfTheJobOnceEach) {
  const auto add = [](std::vector<int> ranks) {
    return Check(Bare(OpKind::kAddProcessSet, "s", std::move(ranks)));
  };
  EXPECT_NE(add({}).find("no ranks given"), std::string::npos);
  EXPECT_NE(add({0, 4}).find("ranks must lie in 0..3, got [0,4]"), std::string::npos);
  EXPECT_NE(add({-1}).find("ranks must lie in 0..3"), std::string::npos);
  EXPECT_NE(add({1, 1}).find("a rank is given twice"), std::string::npos);
  EXPECT_NE(Check(Bare(OpKind::kRemoveProcessSet, "s", {0})).find("cannot be removed"),
            std::string::npos);
}

TEST_F(ValidateTest, AdasumIsForFloatingSums) {
  EXPECT_EQ(Check(Sum([](Request& r) {
              r.op = ReduceOp::kAdasum;
              r.tensors[0].input.dtype = DType::kInt32;
            })),
            "allreduce \"x\": Adasum needs a floating type, got int32");
  const auto scatter = [](Request& r) {
    r.kind = OpKind::kReduceScatter;
    r.op = ReduceOp::kAdasum;
  };
  EXPECT_EQ(Check(Sum(scatter)), "reducescatter \"x\": Adasum is for allreduce only");
  EXPECT_EQ(Check(Sum([&](Request& r) {
              scatter(r);
              r.tensors[0].input.shape = {};
            })),
            "reducescatter \"x\": a tensor without dimensions cannot be scattered");
}

TEST_F(ValidateTest, TheTensorsOfARequestAreInOnePlace) {
  Request request = Sum();
  request.tensors.push_back(request.tensors[0]);
  request.tensors[1].input.device = DeviceType::kCuda;
  request.tensors[1].input.device_index = 1;
  EXPECT_EQ(Check(request),
            "allreduce \"x\": its tensors are not all in one place: on the host and on CUDA "
            "device 1");
}

TEST_F(ValidateTest, AMethodIsForTheSumOfOneTensor) {
  Request gather = values_.AllGather("x");
  gather.method = "int8;bucket=8";
  EXPECT_EQ(Check(gather),
            "allgather \"x\": method \"int8;bucket=8\" is for the allreduce of one tensor");
  EXPECT_NE(Check(Sum([](Request& r) { r.method = "no such method"; })), "");
  EXPECT_EQ(Check(Sum([](Request& r) { r.method = "int8;bucket=8"; })), "");
  EXPECT_EQ(Check(Sum([](Request& r) { r.method = "int8;bucket=8"; })), "") << "known by now";
}

}  // namespace
}  // namespace dad
