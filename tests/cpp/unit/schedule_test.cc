#include "runtime/lane/schedule.h"

#include <gtest/gtest.h>

#include "tests/cpp/engine/engine_fixture.h"

namespace dad {
namespace {

class ScheduleTest : public testing::Test {
 protected:
  // Notes a sum of so many floats; its number in the cache.
  uint32_t Add(const std::string& name, int64_t elements = 4, uint64_t phase = 1,
               uint32_t stream = 0) {
    RequestMeta meta;
    meta.name = name;
    meta.method = "none";
    meta.stream = stream;
    meta.tensors = {{DType::kFloat32, {elements}}};
    cache_.Note(meta, phase);
    return *cache_.Find(KeyOf(meta));
  }
  Schedule Build(int64_t fusion_bytes = 1 << 20, uint32_t id = 0) {
    return Schedule::Build(id, cache_, fusion_bytes, {}, ranks_).value();
  }
  static std::vector<std::vector<uint32_t>> Members(const Schedule& schedule) {
    std::vector<std::vector<uint32_t>> members;
    for (const ScheduledBatch& batch : schedule.batches()) members.push_back(batch.members);
    return members;
  }

  TensorCache cache_{100};
  const std::vector<int> ranks_ = {0, 1};
};

using Batches = std::vector<std::vector<uint32_t>>;

TEST_F(ScheduleTest, TensorsOfOnePhaseShareABatchInTheOrderOfTheirFirstAgreement) {
  const uint32_t b = Add("b"), a = Add("a");
  EXPECT_EQ(Members(Build()), (Batches{{b, a}}));
  EXPECT_TRUE(cache_.Get(a)->scheduled && cache_.Get(b)->scheduled);
}

TEST_F(ScheduleTest, PhasesAndStreamsAreNotFused) {
  const uint32_t a = Add("a", 4, /*phase=*/1), b = Add("b", 4, /*phase=*/2);
  const uint32_t c = Add("c", 4, /*phase=*/1, /*stream=*/9), d = Add("d", 4, /*phase=*/1);
  EXPECT_EQ(Members(Build()), (Batches{{a, d}, {b}, {c}}));
}

TEST_F(ScheduleTest, ATensorThatHeldUpItsBatchTravelsAlone) {
  const uint32_t a = Add("a"), b = Add("b"), c = Add("c");
  cache_.Get(b)->strikes = 2;
  EXPECT_EQ(Members(Build()), (Batches{{a, c}, {b}}));
}

TEST_F(ScheduleTest, ALargeTensorIsCutAndSharesNoBatch) {
  const uint32_t small = Add("small"), large = Add("large", 10'000);
  const Schedule schedule = Build(/*fusion_bytes=*/8192);
  EXPECT_EQ(schedule.BatchesOf(small).size(), 1u);
  EXPECT_GT(schedule.BatchesOf(large).size(), 1u);
  for (uint32_t index : schedule.BatchesOf(large)) {
    EXPECT_EQ(schedule.batches()[index].members, std::vector<uint32_t>{large});
  }
  EXPECT_TRUE(schedule.BatchesOf(77).empty());
}

// Ranks compare the signatures of what they send.
TEST_F(ScheduleTest, BatchesOfOtherTensorsHaveOtherSignatures) {
  Add("a");
  const uint64_t alone = Build().batches()[0].signature;
  EXPECT_EQ(Build(1 << 20, /*id=*/1).batches()[0].signature, alone);
  Add("b");
  EXPECT_NE(Build().batches()[0].signature, alone);
}

TEST_F(ScheduleTest, AForgottenRequestLeavesTheRunsThatWaitForOthers) {
  const uint32_t a = Add("a");
  Add("b");
  Schedule schedule = Build();
  Values values({1});
  auto request = std::make_shared<RequestState>(values.AllReduce("a"), nullptr, nullptr);
  EXPECT_FALSE(schedule.Forget(request));
  schedule.batches()[0].present[a] = request;
  schedule.incomplete().insert(0);
  EXPECT_TRUE(schedule.Forget(request));
  EXPECT_TRUE(schedule.batches()[0].present.empty());
  EXPECT_TRUE(schedule.incomplete().empty());
}

TEST_F(ScheduleTest, AnEmptyCacheMakesAnEmptySchedule) { EXPECT_TRUE(Build().batches().empty()); }

}  // namespace
}  // namespace dad
