#include "runtime/lane/tensor_cache.h"

#include <gtest/gtest.h>

namespace dad {
namespace {

RequestMeta Meta(const std::string& name, Shape shape = {4}) {
  RequestMeta meta;
  meta.name = name;
  meta.method = "none";
  meta.tensors = {{DType::kFloat32, std::move(shape)}};
  return meta;
}

TEST(TensorCacheTest, CountsHowOftenATensorWasAgreedOnAsItIs) {
  TensorCache cache(4);
  EXPECT_EQ(cache.Note(Meta("a"), 7), 1);
  EXPECT_EQ(cache.Note(Meta("a"), 8), 2);
  EXPECT_EQ(cache.Get(0)->phase_key, 7u) << "the phase is that of the first time";
  EXPECT_EQ(cache.Note(Meta("a", {5}), 9), 1) << "another shape is another tensor";
  EXPECT_EQ(cache.Get(0)->phase_key, 9u);
  EXPECT_EQ(cache.end_id(), 1u);
}

TEST(TensorCacheTest, OneNameHasAnEntryForEachKind) {
  TensorCache cache(4);
  RequestMeta gather = Meta("a");
  gather.kind = OpKind::kAllGather;
  cache.Note(Meta("a"), 0);
  cache.Note(gather, 0);
  EXPECT_EQ(cache.Find(KeyOf(Meta("a"))), 0u);
  EXPECT_EQ(cache.Find(KeyOf(gather)), 1u);
}

TEST(TensorCacheTest, ARemovedEntryLeavesItsNumberToTheNext) {
  TensorCache cache(2);
  cache.Note(Meta("a"), 0);
  cache.Note(Meta("b"), 0);
  cache.Remove(KeyOf(Meta("a")));
  EXPECT_EQ(cache.Get(0), nullptr);
  EXPECT_EQ(cache.Find(KeyOf(Meta("a"))), std::nullopt);
  cache.Note(Meta("c"), 0);
  EXPECT_EQ(cache.Find(KeyOf(Meta("c"))), 0u);
  EXPECT_GT(cache.Get(0)->order, cache.Get(1)->order);
}

TEST(TensorCacheTest, TheOldestThatIsNotScheduledMakesRoom) {
  TensorCache cache(2);
  cache.Note(Meta("a"), 0);
  cache.Note(Meta("b"), 0);
  cache.Get(*cache.Find(KeyOf(Meta("a"))))->scheduled = true;
  cache.Note(Meta("c"), 0);
  EXPECT_TRUE(cache.Find(KeyOf(Meta("a"))).has_value());
  EXPECT_FALSE(cache.Find(KeyOf(Meta("b"))).has_value());
  EXPECT_TRUE(cache.Find(KeyOf(Meta("c"))).has_value());
}

TEST(TensorCacheTest, WhereAllAreScheduledNothingNewIsKept) {
  for (const size_t capacity : {size_t{0}, size_t{1}}) {
    TensorCache cache(capacity);
    cache.Note(Meta("a"), 0);
    if (capacity > 0) cache.Get(0)->scheduled = true;
    EXPECT_EQ(cache.Note(Meta("b"), 0), 0);
    EXPECT_FALSE(cache.Find(KeyOf(Meta("b"))).has_value());
    EXPECT_EQ(cache.Find(KeyOf(Meta("a"))).has_value(), capacity > 0);
  }
}

TEST(TensorCacheTest, ATensorThatHeldUpItsBatchTwiceInARowTravelsAlone) {
  CacheEntry entry;
  EXPECT_FALSE(entry.loner());
  entry.strikes = 1;
  EXPECT_FALSE(entry.loner());
  entry.strikes = 2;
  EXPECT_TRUE(entry.loner());
}

}  // namespace
}  // namespace dad
