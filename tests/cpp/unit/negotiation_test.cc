#include "wire/negotiation.h"

#include <gtest/gtest.h>

#include "runtime/lane/negotiator.h"

namespace dad {
namespace {

RequestMeta Meta(const std::string& name, Shape shape = {4}) {
  RequestMeta meta;
  meta.name = name;
  meta.method = "none";
  meta.tensors = {{DType::kFloat32, std::move(shape)}};
  return meta;
}

NegotiationMessage Fresh(std::vector<RequestMeta> metas) {
  NegotiationMessage message;
  for (RequestMeta& meta : metas) message.fresh.push_back({std::move(meta), 0});
  return message;
}

TEST(NegotiationTest, MessagesSurviveTheWire) {
  NegotiationMessage message = Fresh({Meta("a", {3, 1 << 30}), Meta("\"b\"", {})});
  message.joined = true;
  message.recall = true;
  message.begins = true;
  message.slow_line = true;
  message.pending = true;
  message.missing = {7, 300};
  message.stale = {1};
  message.committed = {0, 5, 100'000};
  message.withdrawn = {{"gone", OpKind::kAllGather}};
  message.fusion_bytes = 1 << 20;
  message.known = {{0, 9}, {17, 10}};
  message.fresh[0].meta.ranks = {2, 0};
  message.fresh[0].meta.terms = "by hand";
  message.fresh[0].meta.recurring = false;
  Result<NegotiationMessage> back = DecodeNegotiation(Encode(message));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(Encode(back.value()), Encode(message));
  EXPECT_TRUE(back.value().joined && back.value().recall && back.value().begins &&
              back.value().slow_line && back.value().pending);
  EXPECT_EQ(back.value().fresh[0].meta.terms, "by hand");
  EXPECT_EQ(back.value().withdrawn, message.withdrawn);
  EXPECT_EQ(back.value().known[1].cache_id, 17u);
  EXPECT_EQ(back.value().known[1].phase, 10u);
  EXPECT_EQ(back.value().fresh[0].meta.tensors[0].shape, (Shape{3, 1 << 30}));
}

TEST(NegotiationTest, EveryTruncatedMessageIsRefused) {
  NegotiationMessage message = Fresh({Meta("some name", {3, 4}), Meta("b")});
  message.known = {{3, 1}};
  const std::vector<std::byte> bytes = Encode(message);
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(DecodeNegotiation(std::span(bytes).first(length)).ok()) << length;
  }
  std::vector<std::byte> longer = bytes;
  longer.push_back({});
  EXPECT_FALSE(DecodeNegotiation(longer).ok());
}

TEST(NegotiationTest, SizesThatNobodyCanComputeAreRefused) {
  const int64_t large = int64_t{1} << 40;
  for (const Shape& shape :
       {Shape{-1}, Shape{4, -1}, Shape{large, large}, Shape{0, large, large}}) {
    EXPECT_FALSE(DecodeNegotiation(Encode(Fresh({Meta("a", shape)}))).ok()) << ToString(shape);
  }
  EXPECT_TRUE(DecodeNegotiation(Encode(Fresh({Meta("a", {large, 0})}))).ok());
  NegotiationMessage message;
  message.fusion_bytes = -1;
  EXPECT_FALSE(DecodeNegotiation(Encode(message)).ok());
}

TEST(NegotiatorTest, OrderIsThatOfFirstSightWhateverTheSubmitOrder) {
  TensorCache cache(10);
  Negotiator negotiator({0, 1}, &cache);
  const std::vector<NegotiationMessage> messages = {Fresh({Meta("b"), Meta("a")}),
                                                    Fresh({Meta("a"), Meta("c"), Meta("b")})};
  const Decision decision = negotiator.Decide(messages).value();
  ASSERT_EQ(decision.ready.size(), 2u);
  EXPECT_EQ(decision.ready[0].meta.name, "b");
  EXPECT_EQ(decision.ready[1].meta.name, "a");
  const auto waiting = negotiator.Waiting();
  ASSERT_EQ(waiting.size(), 1u);
  EXPECT_EQ(waiting[0].first.name, "c");
  EXPECT_EQ(waiting[0].second, std::vector<int>{0});
}

TEST(NegotiatorTest, AMismatchWaitsForAllRanksAndNamesAllThatDiffer) {
  TensorCache cache(10);
  Negotiator negotiator({0, 2, 5}, &cache);
  std::vector<NegotiationMessage> messages = {Fresh({Meta("x", {4})}), Fresh({Meta("x", {5})}),
                                              Fresh({})};
  EXPECT_TRUE(negotiator.Decide(messages).value().failed.empty());
  messages = {Fresh({}), Fresh({}), Fresh({Meta("x", {6})})};
  const Decision decision = negotiator.Decide(messages).value();
  ASSERT_EQ(decision.failed.size(), 1u);
  EXPECT_EQ(decision.failed[0].message,
            "ranks disagree on \"x\": shape [4] on rank 0, [5] on rank 2, [6] on rank 5");
  EXPECT_TRUE(negotiator.Waiting().empty());
}

TEST(NegotiatorTest, ANameMayBeUnderWayOncePerKind) {
  TensorCache cache(10);
  Negotiator negotiator({0, 1}, &cache);
  RequestMeta gather = Meta("x");
  gather.kind = OpKind::kAllGather;
  // One rank is ahead of the other.
  std::vector<NegotiationMessage> messages = {Fresh({Meta("x"), gather}), Fresh({Meta("x")})};
  Decision decision = negotiator.Decide(messages).value();
  ASSERT_EQ(decision.ready.size(), 1u);
  EXPECT_EQ(decision.ready[0].meta.kind, OpKind::kAllReduce);
  messages = {Fresh({Meta("x")}), Fresh({gather})};
  decision = negotiator.Decide(messages).value();
  ASSERT_EQ(decision.ready.size(), 1u);
  EXPECT_EQ(decision.ready[0].meta.kind, OpKind::kAllGather);
  EXPECT_TRUE(decision.failed.empty());
  // The other one has it as something else.
  messages = {Fresh({}), Fresh({gather})};
  decision = negotiator.Decide(messages).value();
  ASSERT_EQ(decision.failed.size(), 2u);
  EXPECT_EQ(decision.failed[0].message,
            "ranks disagree on \"x\": collective allreduce on rank 0, allgather on rank 1");
  EXPECT_TRUE(negotiator.Waiting().empty());
}

TEST(NegotiatorTest, ARankThatPlansAndOneThatSendsAreNamedByTheirCompression) {
  TensorCache cache(10);
  Negotiator negotiator({0, 1}, &cache);
  RequestMeta plans;
  plans.name = "x";
  plans.kind = OpKind::kBarrier;
  plans.terms = "rank_dad:rank=2";
  std::vector<NegotiationMessage> messages = {Fresh({plans}), Fresh({Meta("x")})};
  Decision decision = negotiator.Decide(messages).value();
  ASSERT_EQ(decision.failed.size(), 2u);
  EXPECT_EQ(decision.failed[0].message,
            "ranks disagree on \"x\": compression rank_dad:rank=2 on rank 0, none on rank 1; all "
            "need the same one, with the same warmup_steps");
  // Both plan.
  RequestMeta other = plans;
  other.terms = "int8";
  messages = {Fresh({plans}), Fresh({other})};
  decision = negotiator.Decide(messages).value();
  ASSERT_EQ(decision.failed.size(), 1u);
  EXPECT_EQ(decision.failed[0].message,
            "ranks disagree on \"x\": compression rank_dad:rank=2 on rank 0, int8 on rank 1");
}

// Of two requests of which one only stands for what is sent elsewhere.
TEST(NegotiatorTest, TermsAreNamedBeforeAllThatTheyAreInPlaceOf) {
  TensorCache cache(10);
  Negotiator negotiator({0, 1}, &cache);
  RequestMeta by_factors = Meta("x");
  by_factors.method = "factor;layer=4x1";
  by_factors.terms = "Sum, method factor;layer=4x1";
  RequestMeta by_hosts = Meta("x");
  by_hosts.tensors[0].shape = {0};
  by_hosts.terms = "Sum, method int8";
  const std::vector<NegotiationMessage> messages = {Fresh({by_factors}), Fresh({by_hosts})};
  const Decision decision = negotiator.Decide(messages).value();
  ASSERT_EQ(decision.failed.size(), 1u);
  EXPECT_EQ(
      decision.failed[0].message,
      "ranks disagree on \"x\": terms Sum, method factor;layer=4x1 on rank 0, Sum, method int8 "
      "on rank 1");
}

TEST(NegotiatorTest, WhatIsWithdrawnIsNotPutTogetherWithWhatComesAgain) {
  TensorCache cache(10);
  Negotiator negotiator({0, 1}, &cache);
  const RequestKey key{"x", OpKind::kAllReduce};
  std::vector<NegotiationMessage> messages = {Fresh({Meta("x")}), Fresh({})};
  EXPECT_TRUE(negotiator.Decide(messages).value().ready.empty());
  EXPECT_TRUE(negotiator.Waits(0, key) && !negotiator.Waits(1, key));
  messages = {Fresh({}), Fresh({Meta("x", {5})})};
  messages[0].withdrawn = {key};
  const Decision decision = negotiator.Decide(messages).value();
  EXPECT_TRUE(decision.ready.empty() && decision.failed.empty());
  EXPECT_TRUE(!negotiator.Waits(0, key) && negotiator.Waits(1, key));
  messages = {Fresh({}), Fresh({})};
  messages[1].withdrawn = {key};
  (void)negotiator.Decide(messages);
  EXPECT_TRUE(negotiator.Waiting().empty());
}

TEST(NegotiatorTest, StepsBetweenHostsAreRequestsOfTheirOwn) {
  TensorCache cache(10);
  Negotiator negotiator({0, 1}, &cache);
  RequestMeta verdict = Meta("x");
  verdict.kind = OpKind::kBroadcast;
  verdict.root_rank = 0;
  verdict.host_step = HostStep::kVerdict;
  RequestMeta across = Meta("x");
  across.host_step = HostStep::kAcross;
  const RequestMeta itself = Meta("x");
  // Each rank has two of them: neither a disagreement, nor put together with another.
  std::vector<NegotiationMessage> messages = {Fresh({across, verdict}), Fresh({itself, verdict})};
  const Decision decision = negotiator.Decide(messages).value();
  EXPECT_TRUE(decision.failed.empty());
  ASSERT_EQ(decision.ready.size(), 1u);
  EXPECT_EQ(decision.ready[0].meta.host_step, HostStep::kVerdict);
  EXPECT_TRUE(negotiator.Waits(0, KeyOf(across)) && !negotiator.Waits(0, KeyOf(itself)));
  EXPECT_TRUE(negotiator.Waits(1, KeyOf(itself)) && !negotiator.Waits(1, KeyOf(across)));
}

TEST(NegotiatorTest, JoinedRanksAreNotWaitedFor) {
  TensorCache cache(10);
  Negotiator negotiator({0, 1}, &cache);
  NegotiationMessage joined;
  joined.joined = true;
  std::vector<NegotiationMessage> messages = {Fresh({Meta("x")}), joined};
  const Decision decision = negotiator.Decide(messages).value();
  ASSERT_EQ(decision.ready.size(), 1u);
  EXPECT_EQ(decision.ready[0].absent, (std::vector<bool>{false, true}));
  EXPECT_EQ(decision.last_joined, -1);
  messages = {joined, joined};
  EXPECT_EQ(negotiator.Decide(messages).value().last_joined, 0);
}

TEST(NegotiatorTest, AJoinGoesOnWhileARankHasRequestsOpenInOtherSets) {
  TensorCache cache(10);
  Negotiator negotiator({0, 1}, &cache);
  NegotiationMessage joined;
  joined.joined = true;
  NegotiationMessage pending = joined;
  pending.pending = true;
  EXPECT_EQ(negotiator.Decide(std::vector{pending, joined}).value().last_joined, -1);
  EXPECT_TRUE(negotiator.any_joined());
  EXPECT_EQ(negotiator.Decide(std::vector{joined, joined}).value().last_joined, 1);
}

TEST(NegotiatorTest, ARankThatSpokeAsJoinedIsWaitedForIfThatJoinIsOver) {
  TensorCache cache(10);
  Negotiator negotiator({0, 1}, &cache);
  NegotiationMessage joined;
  joined.joined = true;
  NegotiationMessage after = Fresh({Meta("x")});
  after.joins = 1;
  EXPECT_TRUE(negotiator.Decide(std::vector{after, joined}).value().ready.empty());
  EXPECT_FALSE(negotiator.any_joined());
  NegotiationMessage other = after;
  after.fresh.clear();
  const Decision decision = negotiator.Decide(std::vector{after, other}).value();
  ASSERT_EQ(decision.ready.size(), 1u);
  EXPECT_TRUE(decision.ready[0].absent.empty());
}

TEST(NegotiatorTest, AJoinedRootCannotBroadcast) {
  TensorCache cache(10);
  Negotiator negotiator({0, 1}, &cache);
  RequestMeta meta = Meta("x");
  meta.kind = OpKind::kBroadcast;
  meta.root_rank = 1;
  NegotiationMessage joined;
  joined.joined = true;
  const std::vector<NegotiationMessage> messages = {Fresh({meta}), joined};
  EXPECT_EQ(negotiator.Decide(messages).value().failed.size(), 1u);
}

TEST(NegotiatorTest, JoinStrictAllowsOnlyReductionsWhileARankHasJoined) {
  NegotiationMessage joined;
  joined.joined = true;
  for (OpKind kind : {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kBroadcast, OpKind::kAllToAll,
                      OpKind::kReduceScatter}) {
    TensorCache cache(10);
    Negotiator negotiator({0, 1}, &cache, /*join_strict=*/true);
    RequestMeta meta = Meta("x");
    meta.kind = kind;
    meta.root_rank = 0;
    const Decision decision = negotiator.Decide(std::vector{Fresh({meta}), joined}).value();
    const bool allowed = kind == OpKind::kAllReduce;
    EXPECT_EQ(decision.ready.size(), allowed ? 1u : 0u) << Name(kind);
    ASSERT_EQ(decision.failed.size(), allowed ? 0u : 1u) << Name(kind);
    if (allowed) continue;
    EXPECT_NE(decision.failed[0].message.find("rank 1 has joined"), std::string::npos);
  }
}

TEST(NegotiatorTest, AnUnknownNumberIsRefused) {
  TensorCache cache(10);
  Negotiator negotiator({0}, &cache);
  NegotiationMessage message;
  message.known = {{3, 0}};
  EXPECT_FALSE(negotiator.Decide(std::span(&message, 1)).ok());
}

}  // namespace
}  // namespace dad
