#include "wire/snapshot.h"

#include <gtest/gtest.h>

#include "wire/message.h"

namespace dad {
namespace {

TEST(SnapshotTest, TravelsUnchanged) {
  Snapshot snapshot;
  snapshot.rank = 3;
  snapshot.hostname = "left";
  snapshot.pid = 4711;
  snapshot.error = "rank 1: gone";
  snapshot.joined = true;
  snapshot.last_submitted = "allreduce \"a\"";
  snapshot.since_submit = 1.5;
  snapshot.since_cycle = 2.5;
  snapshot.negotiations = 7;
  snapshot.num_requests = 9;
  snapshot.requests = {{"allreduce \"a\"", 1.25, {0, 2}, -1, 0}};
  snapshot.num_batches = 1;
  snapshot.batches = {{"allreduce \"a\" and 3 more", 0.5, {2}, 1, 2}};
  snapshot.num_missing = 1;
  snapshot.missing = {{"b", {0, 1}}};
  snapshot.where = "train.py:31";
  snapshot.stack = "train.py:1\ntrain.py:31";
  const auto again = DecodeSnapshot(Encode(snapshot));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(Encode(again.value()), Encode(snapshot));
  EXPECT_EQ(again.value().requests[0].waits_for, (std::vector<int>{0, 2}));
  EXPECT_EQ(again.value().batches[0].round, 1);
  EXPECT_EQ(again.value().missing[0].name, "b");
  EXPECT_EQ(again.value().since_result, -1.0);
  EXPECT_EQ(again.value().stack, snapshot.stack);
}

TEST(SnapshotTest, FitsAControlMessageHoweverMuchThereIs) {
  const std::string name(10'000, 'x');
  const std::vector<int> ranks(1000, 900);
  Snapshot snapshot;
  snapshot.hostname = snapshot.error = snapshot.last_submitted = name;
  snapshot.requests.assign(50, {name, 1.0, ranks, 0, 0});
  snapshot.batches = snapshot.requests;
  snapshot.missing.assign(50, {name, ranks});
  snapshot.where = snapshot.stack = name + "the end";
  const auto bytes = Encode(snapshot);
  EXPECT_LE(bytes.size(), kLongestWhole);
  const auto again = DecodeSnapshot(bytes);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again.value().requests.size(), kMostListed);
  EXPECT_TRUE(again.value().stack.ends_with("the end")) << "the innermost line is at the end";
}

TEST(SnapshotTest, EveryTruncationIsRefused) {
  Snapshot snapshot;
  snapshot.requests = {{"a", 1.25, {0, 2}, -1, 0}};
  const auto bytes = Encode(snapshot);
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(DecodeSnapshot(std::span(bytes).first(length)).ok()) << length;
  }
}

}  // namespace
}  // namespace dad
