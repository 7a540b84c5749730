// What int8 keeps between steps, and how it cuts a tensor (exchange/method/int8/int8.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/int_quantise.h"
#include "exchange/exchange.h"
#include "exchange/feedback/feedback.h"
#include "exchange/feedback/state_store.h"

namespace dad {

// A piece of whole buckets per rank.
struct Int8Pieces {
  int64_t count = 0;
  int64_t bucket = 1;
  int num_ranks = 1;

  int64_t Begin(int p) const {
    const int64_t buckets = (count + bucket - 1) / bucket;
    return std::min(count, buckets * p / num_ranks * bucket);
  }
  int64_t Size(int p) const { return Begin(p + 1) - Begin(p); }
  size_t EncodedSize(int p) const { return QuantisedBytes(Size(p), bucket); }
  size_t EncodedBegin(int p) const {
    size_t begin = 0;
    for (int i = 0; i < p; ++i) begin += EncodedSize(i);
    return begin;
  }
  // The size of a message of a round: a flag and a piece, sent to the owner or by the owner.
  int64_t MessageBytes(int round, int from, int to, const Group& group) const {
    const int piece = round == 0 ? to : from;
    const bool silent = round == 0 ? group.Joined(from) : group.Joined(to);
    if (silent || from == to || Size(piece) == 0) return 0;
    return 1 + static_cast<int64_t>(EncodedSize(piece));
  }
};

template <typename T>
class Int8State final : public ExchangeState {
 public:
  void Export(std::vector<StateTensor>& out) override {
    rank.Save("rank_residual", out);
    owner.Save("owner_residual", out);
  }
  Status Import(const std::vector<StateTensor>& tensors) override {
    for (const StateTensor& tensor : tensors) {
      DAD_RETURN_IF_ERROR((tensor.name == "rank_residual" ? rank : owner).Load(tensor));
    }
    return Status::Ok();
  }
  void ReturnLast() override {
    owner.Return(applied);
    applied.clear();
  }

  Feedback<T> rank;        // E_w
  Feedback<T> owner;       // E_o, of this rank's piece
  std::vector<T> applied;  // M of this rank's piece in the last step
  // State of a step that has begun and may be begun again.
  uint64_t submit_id = 0;
  bool finite = true;
  std::vector<std::byte> bytes;  // all pieces, one after the other
};

}  // namespace dad
