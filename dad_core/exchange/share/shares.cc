#include "exchange/share/shares.h"

#include <cstring>

namespace dad {
namespace {

std::string Quoted(const TensorSpec& spec) { return "\"" + spec.name + "\""; }

// Keeps sums over ranks far from overflow when rows are empty and any count would fit.
constexpr int64_t kMaxRows = int64_t{1} << 48;

}  // namespace

Status CheckShareBytes(const TensorSpec& spec, int from_rank, ByteSpan share,
                       int64_t expected_bytes) {
  if (static_cast<int64_t>(share.size()) == expected_bytes) return Status::Ok();
  return Status::InvalidArgument(Quoted(spec) + ": rank " + std::to_string(from_rank) + " sent " +
                                 std::to_string(share.size()) + " bytes, expected " +
                                 std::to_string(expected_bytes));
}

Status CheckContribution(const TensorSpec& spec, const Contribution& mine, bool needs_output) {
  const int64_t input_elements = mine.input.num_elements();
  if (mine.input.dtype != spec.dtype) {
    return Status::InvalidArgument(Quoted(spec) + ": input is " + Name(mine.input.dtype) +
                                   ", expected " + Name(spec.dtype));
  }
  if (input_elements > 0 && mine.input.data == nullptr) {
    return Status::InvalidArgument(Quoted(spec) + ": input has no memory");
  }
  if (!needs_output) return Status::Ok();
  if (input_elements != NumElements(spec.shape)) {
    return Status::InvalidArgument(Quoted(spec) + ": input has shape " +
                                   ToString(mine.input.shape) + ", expected " +
                                   ToString(spec.shape));
  }
  if (mine.output.dtype != spec.dtype || mine.output.num_elements() != input_elements ||
      (input_elements > 0 && mine.output.data == nullptr)) {
    return Status::InvalidArgument(Quoted(spec) + ": output is " + Name(mine.output.dtype) +
                                   ToString(mine.output.shape) + ", expected " + Name(spec.dtype) +
                                   ToString(spec.shape));
  }
  return Status::Ok();
}

void AppendRows(const Rows& rows, GatherBuffer& out) {
  out.AppendValue(rows.count);
  out.Reference(rows.bytes.data(), rows.bytes.size());
}

Result<Rows> ParseRows(const TensorSpec& spec, int from_rank, ByteSpan share, int64_t row_bytes) {
  const std::string who = Quoted(spec) + ": rank " + std::to_string(from_rank);
  Rows rows;
  if (share.size() < sizeof rows.count) {
    return Status::InvalidArgument(who + " sent " + std::to_string(share.size()) +
                                   " bytes, too few to say how many rows follow");
  }
  std::memcpy(&rows.count, share.data(), sizeof rows.count);
  rows.bytes = share.subspan(sizeof rows.count);
  const int64_t num_bytes = static_cast<int64_t>(rows.bytes.size());
  const bool fits = row_bytes == 0
                        ? num_bytes == 0
                        : num_bytes % row_bytes == 0 && rows.count == num_bytes / row_bytes;
  if (rows.count < 0 || rows.count > kMaxRows || !fits) {
    return Status::InvalidArgument(who + " announced " + std::to_string(rows.count) + " rows of " +
                                   std::to_string(row_bytes) + " bytes, but sent " +
                                   std::to_string(num_bytes));
  }
  return rows;
}

Result<std::vector<int64_t>> SplitsOf(const TensorSpec& spec, const Contribution& mine,
                                      int num_ranks) {
  const std::string who = Quoted(spec) + ": ";
  if (mine.input.shape.empty()) {
    return Status::InvalidArgument(who + "alltoall needs a first dimension to split");
  }
  const int64_t num_rows = mine.input.shape[0];
  if (mine.splits.empty()) {
    if (num_rows % num_ranks == 0) {
      return std::vector<int64_t>(static_cast<size_t>(num_ranks), num_rows / num_ranks);
    }
    return Status::InvalidArgument(who + std::to_string(num_rows) +
                                   " rows cannot be split evenly over " +
                                   std::to_string(num_ranks) + " ranks");
  }
  if (mine.splits.size() != static_cast<size_t>(num_ranks)) {
    return Status::InvalidArgument(who + std::to_string(mine.splits.size()) + " splits for " +
                                   std::to_string(num_ranks) + " ranks");
  }
  int64_t left = num_rows;
  for (const int64_t count : mine.splits) {
    left = count < 0 || count > left ? -1 : left - count;
    if (left < 0) break;
  }
  if (left == 0) return mine.splits;
  return Status::InvalidArgument(who + "splits do not add up to " + std::to_string(num_rows) +
                                 " rows");
}

int64_t RowsOfRank(int64_t num_rows, int num_ranks, int rank) {
  return num_rows / num_ranks + (rank < num_rows % num_ranks ? 1 : 0);
}

Status CheckNumRows(const TensorSpec& spec, int from_rank, int64_t num_rows) {
  if (num_rows >= 0 && num_rows <= kMaxRows) return Status::Ok();
  return Status::InvalidArgument(Quoted(spec) + ": rank " + std::to_string(from_rank) +
                                 " announced " + std::to_string(num_rows) + " rows");
}

int64_t RowBytes(const TensorSpec& spec) {
  int64_t bytes = static_cast<int64_t>(SizeOf(spec.dtype));
  for (size_t d = 1; d < spec.shape.size(); ++d) bytes *= spec.shape[d];
  return bytes;
}

Shape WithRows(const TensorSpec& spec, int64_t rows) {
  if (spec.shape.empty()) return {rows};
  Shape shape = spec.shape;
  shape[0] = rows;
  return shape;
}

}  // namespace dad
