#include "runtime/lane/fuser.h"

#include <gtest/gtest.h>

namespace dad {
namespace {

FuseItem Floats(int request, int64_t elements, uint64_t key = 0, int tensor = 0) {
  return {request, tensor, elements, 4, true, key};
}

TEST(FuserTest, EmptyReadyListMakesNoBatch) { EXPECT_TRUE(Fuse({}, 1000).empty()); }

TEST(FuserTest, SmallTensorsShareABatchInOrder) {
  const std::vector<FuseItem> items = {Floats(0, 10), Floats(1, 20), Floats(2, 30)};
  const auto batches = Fuse(items, 10'000);
  ASSERT_EQ(batches.size(), 1u);
  ASSERT_EQ(batches[0].parts.size(), 3u);
  EXPECT_EQ(batches[0].parts[2].request, 2);
  EXPECT_EQ(batches[0].bytes, 240);
}

TEST(FuserTest, ABatchClosesBeforeItGetsTooLarge) {
  const std::vector<FuseItem> items(15, Floats(0, 20));
  std::vector<FuseItem> numbered = items;
  for (size_t i = 0; i < items.size(); ++i) numbered[i].request = static_cast<int>(i);
  const auto batches = Fuse(numbered, 1000);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].parts.size(), 12u);
}

TEST(FuserTest, DifferentKeysNeverMeet) {
  const std::vector<FuseItem> items = {Floats(0, 1, 7), Floats(1, 1, 8), Floats(2, 1, 8)};
  const auto batches = Fuse(items, 1000);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[1].parts.size(), 2u);
}

TEST(FuserTest, LargeTensorIsCutAndTravelsAlone) {
  struct Case {
    int64_t elements;
    size_t slices;
  };
  // Of 400 bytes at most, 50 at least, and eight in between.
  for (const Case& c : {Case{13, 2}, Case{26, 3}, Case{400, 8}, Case{1001, 11}}) {
    const std::vector<FuseItem> items = {Floats(0, 1), Floats(1, c.elements), Floats(2, 1)};
    const auto batches = Fuse(items, 400);
    ASSERT_EQ(batches.size(), c.slices + 2) << c.elements;
    int64_t covered = 0;
    for (size_t i = 1; i <= c.slices; ++i) {
      ASSERT_EQ(batches[i].parts.size(), 1u);
      EXPECT_EQ(batches[i].parts[0].slice.begin, covered);
      EXPECT_LE(batches[i].bytes, 400);
      covered += batches[i].parts[0].slice.count;
    }
    EXPECT_EQ(covered, c.elements);
  }
}

TEST(FuserTest, WhatIsNotElementwiseIsNeverCut) {
  const std::vector<FuseItem> items = {{0, 0, 5000, 4, false, 0}};
  const auto batches = Fuse(items, 1000);
  ASSERT_EQ(batches.size(), 1u);
  EXPECT_EQ(batches[0].parts[0].slice.count, 5000);
}

TEST(FuserTest, ALargeGroupSharesNoBatchWithOthers) {
  const std::vector<FuseItem> items = {Floats(0, 10), Floats(1, 200, 0, 0), Floats(1, 100, 0, 1),
                                       Floats(1, 10, 0, 2), Floats(2, 10)};
  for (const FusedBatch& batch : Fuse(items, 1000)) {
    for (const FusedBatch::Part& part : batch.parts) {
      EXPECT_EQ(part.request, batch.parts[0].request);
    }
  }
}

TEST(FuserTest, ZeroFusesNothingAndCutsNothing) {
  const std::vector<FuseItem> items = {Floats(0, 1), Floats(1, 100'000), Floats(2, 0),
                                       Floats(3, 0)};
  const auto batches = Fuse(items, 0);
  ASSERT_EQ(batches.size(), 4u);
  EXPECT_EQ(batches[1].parts[0].slice.count, 100'000);
}

}  // namespace
}  // namespace dad
