#include "exchange/shares.h"

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
