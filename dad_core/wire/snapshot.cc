#include "wire/snapshot.h"

#include <algorithm>
#include <string>

#include "util/byte_io.h"

namespace dad {
namespace {

// With these, the longest message has about 12 KiB.
constexpr size_t kLongestName = 160;
constexpr size_t kLongestLine = 480;
constexpr size_t kLongestStack = 4096;
constexpr size_t kMostRanks = 64;

// Removes the middle: both ends of a name or of a stack are informative.
std::string Cut(const std::string& text, size_t longest) {
  if (text.size() <= longest) return text;
  // Not inside a character of UTF-8: Python would not take the rest for text.
  const auto continues = [&text](size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80;
  };
  size_t head = longest / 4;
  size_t tail = text.size() - (longest - head - 5);
  while (head > 0 && continues(head)) --head;
  while (tail < text.size() && continues(tail)) ++tail;
  return text.substr(0, head) + " ... " + text.substr(tail);
}

void WriteRanks(const std::vector<int>& ranks, ByteWriter& out) {
  const size_t count = std::min(ranks.size(), kMostRanks);
  out.Varint(count);
  for (size_t i = 0; i < count; ++i) out.Varint(static_cast<uint64_t>(ranks[i]));
}

// A longer list is not ours: the reader fails.
size_t ReadCount(ByteReader& in, size_t most) {
  const size_t count = in.Count();
  if (count <= most) return count;
  (void)in.Take(in.left() + 1);
  return 0;
}

std::vector<int> ReadRanks(ByteReader& in) {
  std::vector<int> ranks(ReadCount(in, kMostRanks));
  for (int& rank : ranks) rank = static_cast<int>(in.Varint() & 0x7fffffff);
  return ranks;
}

template <typename T, typename Write>
void WriteList(const std::vector<T>& list, ByteWriter& out, const Write& write) {
  const size_t count = std::min(list.size(), kMostListed);
  out.Varint(count);
  for (size_t i = 0; i < count; ++i) write(list[i]);
}

void WriteOpen(const std::vector<Snapshot::Open>& list, ByteWriter& out) {
  WriteList(list, out, [&out](const Snapshot::Open& open) {
    out.Text(Cut(open.what, kLongestName));
    out.Value(open.seconds);
    WriteRanks(open.waits_for, out);
    out.Value(static_cast<int32_t>(open.round));
    out.Value(static_cast<int32_t>(open.num_rounds));
  });
}

std::vector<Snapshot::Open> ReadOpen(ByteReader& in) {
  std::vector<Snapshot::Open> list(ReadCount(in, kMostListed));
  for (Snapshot::Open& open : list) {
    open.what = in.Text();
    open.seconds = in.Value<double>();
    open.waits_for = ReadRanks(in);
    open.round = in.Value<int32_t>();
    open.num_rounds = in.Value<int32_t>();
  }
  return list;
}

}  // namespace

std::vector<std::byte> Encode(const Snapshot& snapshot) {
  ByteWriter out;
  out.Value(static_cast<int32_t>(snapshot.rank));
  out.Text(Cut(snapshot.hostname, kLongestName));
  out.Value(snapshot.pid);
  out.Text(Cut(snapshot.error, kLongestLine));
  out.Value(static_cast<uint8_t>(snapshot.joined));
  out.Text(Cut(snapshot.last_submitted, kLongestName));
  out.Value(snapshot.since_submit);
  out.Value(snapshot.since_result);
  out.Value(snapshot.since_cycle);
  out.Value(snapshot.negotiations);
  out.Value(snapshot.num_requests);
  WriteOpen(snapshot.requests, out);
  out.Value(snapshot.num_batches);
  WriteOpen(snapshot.batches, out);
  out.Value(snapshot.num_missing);
  WriteList(snapshot.missing, out, [&out](const Snapshot::Missing& missing) {
    out.Text(Cut(missing.name, kLongestName));
    WriteRanks(missing.ranks, out);
  });
  out.Text(Cut(snapshot.where, kLongestLine));
  out.Text(Cut(snapshot.stack, kLongestStack));
  return out.bytes();
}

Result<Snapshot> DecodeSnapshot(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  Snapshot snapshot;
  snapshot.rank = in.Value<int32_t>();
  snapshot.hostname = in.Text();
  snapshot.pid = in.Value<int64_t>();
  snapshot.error = in.Text();
  snapshot.joined = in.Value<uint8_t>() != 0;
  snapshot.last_submitted = in.Text();
  snapshot.since_submit = in.Value<double>();
  snapshot.since_result = in.Value<double>();
  snapshot.since_cycle = in.Value<double>();
  snapshot.negotiations = in.Value<int64_t>();
  snapshot.num_requests = in.Value<int64_t>();
  snapshot.requests = ReadOpen(in);
  snapshot.num_batches = in.Value<int64_t>();
  snapshot.batches = ReadOpen(in);
  snapshot.num_missing = in.Value<int64_t>();
  snapshot.missing.resize(ReadCount(in, kMostListed));
  for (Snapshot::Missing& missing : snapshot.missing) {
    missing.name = in.Text();
    missing.ranks = ReadRanks(in);
  }
  snapshot.where = in.Text();
  snapshot.stack = in.Text();
  if (!in.AtEnd()) return Status::InvalidArgument("malformed state");
  return snapshot;
}

}  // namespace dad
