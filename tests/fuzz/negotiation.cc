// wire/negotiation.h: a message.
#include "wire/negotiation.h"

#include "fuzz.h"

namespace dad::fuzz {
namespace {

void Run(ByteSpan input) {
  const Result<NegotiationMessage> message = DecodeNegotiation(input);
  if (!message.ok()) return;
  // Encoded again it says the same; every message has one encoding but for long varints.
  const Bytes encoded = Encode(message.value());
  const Result<NegotiationMessage> again = DecodeNegotiation(encoded);
  Require(again.ok(), "our own message is refused");
  Require(Encode(again.value()) == encoded, "no round trip");
  // Requests of others are compared with ours, and the difference is told.
  const auto& fresh = message.value().fresh;
  Require(message.value().fusion_bytes >= 0, "a negative number of bytes");
  for (size_t i = 0; i < fresh.size(); ++i) {
    Difference difference;
    // NaN as a scale differs from itself.
    (void)Differ(fresh[i].meta, again.value().fresh[i].meta, &difference);
    (void)Differ(fresh[i].meta, fresh[0].meta, &difference);
    // A rank that has joined makes exchanges for requests that only others have.
    for (const TensorMeta& tensor : fresh[i].meta.tensors) {
      Require(NumElements(tensor.shape) >= 0, "a negative number of elements");
    }
  }
}

NegotiationMessage Full() {
  NegotiationMessage message;
  message.fusion_bytes = 64 << 20;
  message.known = {{0, 1}, {3, 1}, {17, 2}};
  NegotiationMessage::Fresh fresh;
  fresh.meta.name = "fc1.weight";
  fresh.meta.op = ReduceOp::kAverage;
  fresh.meta.method = "low_rank;rank=4;wire=int4;combine=owner;owner=2;layer=10x784:bias";
  fresh.meta.tensors = {{DType::kFloat32, {7850}}};
  fresh.phase = 3;
  message.fresh.push_back(fresh);
  fresh.meta = {};
  fresh.meta.name = "gather";
  fresh.meta.kind = OpKind::kAllGather;
  fresh.meta.method = "none";
  fresh.meta.tensors = {{DType::kInt64, {3, 4}}, {DType::kBool, {}}};
  message.fresh.push_back(fresh);
  return message;
}

std::vector<Bytes> Seeds() {
  NegotiationMessage empty, recall, full = Full(), ranks;
  empty.joined = true;
  recall.recall = true;
  recall.missing = {1, 2, 300};
  recall.stale = {5};
  recall.committed = {1, 1, 70000};
  NegotiationMessage::Fresh set;
  set.meta.name = "set";
  set.meta.kind = OpKind::kAddProcessSet;
  set.meta.ranks = {0, 2, 5};
  ranks.fresh.push_back(set);
  return {Encode(empty), Encode(recall), Encode(full), Encode(ranks)};
}

const Register registered({"negotiation", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
