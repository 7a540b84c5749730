// What chunked top-k keeps between steps, and how it cuts a tensor (exchange/chunk_topk.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/chunk_topk.h"
#include "exchange/exchange.h"
#include "exchange/feedback/accumulators.h"
#include "exchange/feedback/state_store.h"

namespace dad {

struct ChunkTopKSettings {
  ChunkCode code;
  double decay = 1;
  bool by_owner = false;
  int first = 0;          // the owner of the first piece
  bool by_layer = false;  // chunk_topk_rows: the contribution is a layer
};

// InvalidArgument, naming the option, unless all of them make sense.
Result<ChunkTopKSettings> ParseChunkTopK(const Method& method);

// A piece of whole chunks per rank. `first` has the first one: many tensors of a model have fewer
// chunks than there are ranks, and these should not all be served by the same rank.
class ChunkPieces {
 public:
  ChunkPieces() = default;
  ChunkPieces(int64_t count, int64_t chunk, int num_ranks, int first)
      : count_(count), chunk_(chunk), num_ranks_(num_ranks), first_(first % num_ranks) {}

  // Begin and size of the piece that `rank` owns.
  int64_t Begin(int rank) const { return Edge(Number(rank)); }
  int64_t Size(int rank) const { return Edge(Number(rank) + 1) - Edge(Number(rank)); }

 private:
  int Number(int rank) const { return (rank - first_ + num_ranks_) % num_ranks_; }
  int64_t Edge(int number) const {
    const int64_t chunks = (count_ + chunk_ - 1) / chunk_;
    return std::min(count_, chunks * number / num_ranks_ * chunk_);
  }

  int64_t count_ = 0;
  int64_t chunk_ = 1;
  int num_ranks_ = 1;
  int first_ = 0;
};

template <typename T>
class ChunkTopKState final : public ExchangeState {
 public:
  explicit ChunkTopKState(const ChunkCode& code) : code_(code) {}

  // "rank_residual", and of an owner "owner_residual" with "owner_begin", where it is in the
  // tensor.
  void Export(std::vector<StateTensor>& out) override;
  Status Import(const std::vector<StateTensor>& tensors) override;
  void ReturnLast() override;

  // Zeros, unless there is something already. InvalidArgument if that has another size or place.
  Status Fit(int64_t count, int64_t piece_begin, int64_t piece_count);

  Accumulators<T> rank;   // E_w
  Accumulators<T> owner;  // E_o, of this rank's piece
  // The last step's encoding: of what this rank sent (gather), or of M as far as it is this rank's
  // piece (owner).
  std::vector<std::byte> last;
  bool last_is_of_owner = false;

 private:
  static int64_t CountOf(const Accumulators<T>& values);

  const ChunkCode code_;
  int64_t owner_begin_ = 0;
};

}  // namespace dad
