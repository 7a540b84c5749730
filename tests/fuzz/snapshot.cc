// wire/snapshot.h: what a rank says of itself.
#include "wire/snapshot.h"

#include "fuzz.h"

namespace dad::fuzz {
namespace {

void Run(ByteSpan input) {
  const Result<Snapshot> snapshot = DecodeSnapshot(input);
  if (!snapshot.ok()) return;
  // What is too long is cut, so the first encoding may say less; from then on it stays.
  const Bytes encoded = Encode(snapshot.value());
  const Result<Snapshot> again = DecodeSnapshot(encoded);
  Require(again.ok(), "our own message is refused");
  const Bytes once_more = Encode(again.value());
  Require(once_more == encoded, "no round trip");
}

std::vector<Bytes> Seeds() {
  Snapshot empty, full;
  full.rank = 3;
  full.hostname = "left";
  full.last_submitted = "allreduce \"fc1.weight\"";
  full.num_requests = full.num_batches = full.num_missing = 1;
  full.requests = {{"allreduce \"fc1.weight\"", 1.25, {0, 2}, -1, 0}};
  full.batches = {{"allreduce \"fc1.weight\"", 0.5, {2}, 1, 2}};
  full.missing = {{"fc2.weight", {0, 300}}};
  full.where = "train.py:31";
  full.stack = "train.py:1\ntrain.py:31";
  return {Encode(empty), Encode(full)};
}

const Register registered({"snapshot", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
