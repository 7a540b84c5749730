// What int8 keeps between steps, and how it cuts a tensor (exchange/int8.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "codec/int_quantise.h"
#include "exchange/by_method.h"
#include "exchange/exchange.h"
#include "exchange/state_store.h"

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
  // Of a round: a flag and a piece, to its owner or from it.
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
    Save("rank_residual", residual, out);
    Save("owner_residual", owner_residual, out);
  }
  Status Import(const std::vector<StateTensor>& tensors) override {
    for (const StateTensor& tensor : tensors) {
      const auto count = static_cast<size_t>(NumElements(tensor.shape));
      if (tensor.dtype != DTypeOf<T>() || tensor.bytes.size() != count * sizeof(T)) {
        return Status::InvalidArgument("a saved " + tensor.name + " has another type");
      }
      std::vector<T>& values = tensor.name == "rank_residual" ? residual : owner_residual;
      values.resize(count);
      if (count > 0) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    }
    return Status::Ok();
  }
  void ReturnLast() override {
    for (size_t i = 0; i < applied.size() && i < owner_residual.size(); ++i) {
      owner_residual[i] += applied[i];
    }
    applied.clear();
  }

  std::vector<T> residual;
  std::vector<T> owner_residual;  // of this rank's piece
  std::vector<T> applied;         // M of this rank's piece in the last step
  // Of a step that was begun and may be begun again.
  uint64_t submit_id = 0;
  bool finite = true;
  std::vector<std::byte> bytes;  // all pieces, one after the other
  std::vector<T> next_residual;  // takes the place of `residual` when the step is over

 private:
  static void Save(const char* name, const std::vector<T>& values, std::vector<StateTensor>& out) {
    if (values.empty()) return;
    StateTensor tensor{name, DTypeOf<T>(), {static_cast<int64_t>(values.size())}, {}};
    tensor.bytes.resize(values.size() * sizeof(T));
    std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
    out.push_back(std::move(tensor));
  }
};

}  // namespace dad
