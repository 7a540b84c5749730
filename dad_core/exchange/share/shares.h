// What the exchanges have in common: checks of what came, and messages of rows.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dad/status.h"
#include "exchange/exchange.h"
#include "util/gather_buffer.h"

namespace dad {

// InvalidArgument, naming tensor and rank, unless `share` has the bytes both sides know of.
Status CheckShareBytes(const TensorSpec& spec, int from_rank, ByteSpan share,
                       int64_t expected_bytes);

// InvalidArgument unless the contribution has memory for its elements and, if the kind
// writes into one given beforehand, an output of the same size.
Status CheckContribution(const TensorSpec& spec, const Contribution& mine, bool needs_output);

// Rows of a first dimension that only the sender knows:  int64 count | count * row_bytes.
struct Rows {
  int64_t count = 0;
  ByteSpan bytes;
};

// The rows are referenced, not copied.
void AppendRows(const Rows& rows, GatherBuffer& out);

// A view into `share`.
Result<Rows> ParseRows(const TensorSpec& spec, int from_rank, ByteSpan share, int64_t row_bytes);

// The rows of `mine` that go to each rank in an alltoall: its splits, or as many to each.
Result<std::vector<int64_t>> SplitsOf(const TensorSpec& spec, const Contribution& mine,
                                      int num_ranks);

// Of `num_rows` that are shared out over all ranks those of `rank`: the remainder goes to the
// lowest ranks.
int64_t RowsOfRank(int64_t num_rows, int num_ranks, int rank);

// InvalidArgument, naming tensor and rank, for a number of rows that no rank can mean.
Status CheckNumRows(const TensorSpec& spec, int from_rank, int64_t num_rows);

// Bytes of shape[1:]; a tensor without dimensions is one row.
int64_t RowBytes(const TensorSpec& spec);

// `spec.shape` with another first dimension.
Shape WithRows(const TensorSpec& spec, int64_t rows);

}  // namespace dad
