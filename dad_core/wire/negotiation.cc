#include "wire/negotiation.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "util/byte_io.h"

namespace dad {
namespace {

constexpr uint8_t kJoined = 1;
constexpr uint8_t kRecall = 2;
constexpr uint8_t kBegins = 4;
constexpr uint8_t kSlowLine = 8;
constexpr uint8_t kPending = 16;
// Flags of a request.
constexpr uint8_t kRecurring = 1;
constexpr uint8_t kOnDevice = 2;

// One byte.
constexpr int kHostStepShift = 4;
void WriteKind(OpKind kind, HostStep step, ByteWriter& out) {
  out.Value(
      static_cast<uint8_t>(static_cast<int>(kind) | static_cast<int>(step) << kHostStepShift));
}
std::pair<OpKind, HostStep> ReadKind(ByteReader& in) {
  const auto byte = in.Value<uint8_t>();
  return {static_cast<OpKind>(byte & ((1 << kHostStepShift) - 1)),
          static_cast<HostStep>(byte >> kHostStepShift)};
}

void WriteMeta(const RequestMeta& meta, ByteWriter& out) {
  out.Text(meta.name);
  WriteKind(meta.kind, meta.host_step, out);
  out.Value(static_cast<uint8_t>(meta.op));
  out.Value(static_cast<int32_t>(meta.root_rank));
  out.Value(meta.prescale);
  out.Value(meta.postscale);
  out.Text(meta.method.text());
  out.Text(meta.terms);
  out.Varint(meta.stream);
  out.Value(static_cast<uint8_t>((meta.recurring ? kRecurring : 0) |
                                 (meta.device == DeviceType::kCuda ? kOnDevice : 0)));
  out.Varint(meta.tensors.size());
  for (const TensorMeta& tensor : meta.tensors) {
    out.Value(static_cast<uint8_t>(tensor.dtype));
    out.Varint(tensor.shape.size());
    for (int64_t extent : tensor.shape) out.Varint(static_cast<uint64_t>(extent));
  }
  out.Varint(meta.ranks.size());
  for (int rank : meta.ranks) out.Varint(static_cast<uint64_t>(rank));
}

RequestMeta ReadMeta(ByteReader& in) {
  RequestMeta meta;
  meta.name = in.Text();
  std::tie(meta.kind, meta.host_step) = ReadKind(in);
  meta.op = static_cast<ReduceOp>(in.Value<uint8_t>());
  meta.root_rank = in.Value<int32_t>();
  meta.prescale = in.Value<double>();
  meta.postscale = in.Value<double>();
  meta.method = in.Text();
  meta.terms = in.Text();
  meta.stream = static_cast<uint32_t>(in.Varint());
  const auto flags = in.Value<uint8_t>();
  meta.recurring = flags & kRecurring;
  meta.device = flags & kOnDevice ? DeviceType::kCuda : DeviceType::kCpu;
  meta.tensors.resize(in.Count());
  for (TensorMeta& tensor : meta.tensors) {
    tensor.dtype = static_cast<DType>(in.Value<uint8_t>());
    tensor.shape.resize(in.Count());
    for (int64_t& extent : tensor.shape) extent = static_cast<int64_t>(in.Varint());
  }
  meta.ranks.resize(in.Count());
  for (int& rank : meta.ranks) rank = static_cast<int>(in.Varint());
  return meta;
}

// Whether the number of bytes can be computed, in any order of the dimensions.
bool IsCountable(const Shape& shape) {
  constexpr int64_t kMost = int64_t{1} << 56;
  int64_t product = 1;
  for (const int64_t extent : shape) {
    if (extent < 0 || extent > kMost / product) return false;
    product *= std::max<int64_t>(extent, 1);
  }
  return true;
}

bool Valid(const RequestMeta& meta) {
  if (meta.kind > OpKind::kRemoveProcessSet || meta.op > ReduceOp::kAdasum) return false;
  if (meta.host_step > HostStep::kOrphans) return false;
  return std::all_of(meta.tensors.begin(), meta.tensors.end(), [](const TensorMeta& tensor) {
    return static_cast<int>(tensor.dtype) < kNumDTypes && IsCountable(tensor.shape);
  });
}

std::string RanksText(const std::vector<int>& ranks) {
  return ToString(Shape(ranks.begin(), ranks.end()));
}

}  // namespace

RequestMeta MetaOf(const Request& request) {
  RequestMeta meta;
  meta.name = request.name;
  meta.kind = request.kind;
  meta.host_step = request.host_step;
  meta.op = request.op;
  meta.root_rank = request.root_rank;
  meta.prescale = request.prescale;
  meta.postscale = request.postscale;
  meta.method = request.method;
  meta.terms = request.terms;
  meta.stream = request.stream;
  meta.recurring = request.recurring;
  meta.ranks = request.ranks;
  meta.tensors.reserve(request.tensors.size());
  if (!request.tensors.empty()) meta.device = request.tensors[0].input.device;
  for (const Contribution& tensor : request.tensors) {
    meta.tensors.push_back({tensor.input.dtype, tensor.input.shape});
  }
  return meta;
}

bool FirstDimensionVaries(OpKind kind) {
  return kind == OpKind::kAllGather || kind == OpKind::kAllToAll;
}

bool Differ(const RequestMeta& a, const RequestMeta& b, Difference* difference) {
  auto differs = [&](const char* what, std::string in_a, std::string in_b) {
    *difference = {what, std::move(in_a), std::move(in_b)};
    return true;
  };
  if (a.kind != b.kind) return differs("collective", Name(a.kind), Name(b.kind));
  if (a.op != b.op) return differs("op", Name(a.op), Name(b.op));
  // Compared before the values that the terms stand for.
  if (!a.terms.empty() && !b.terms.empty() && a.terms != b.terms) {
    return differs(a.kind == OpKind::kBarrier ? "compression" : "terms", a.terms, b.terms);
  }
  if (a.device != b.device) return differs("device", Name(a.device), Name(b.device));
  if (a.root_rank != b.root_rank) {
    return differs("root rank", std::to_string(a.root_rank), std::to_string(b.root_rank));
  }
  if (a.method != b.method) return differs("method", a.method.text(), b.method.text());
  if (a.terms != b.terms) return differs("terms", a.terms, b.terms);
  // The stream selects the state that a method continues with.
  if (!a.method.none() && a.stream != b.stream) {
    return differs("stream", std::to_string(a.stream), std::to_string(b.stream));
  }
  if (a.prescale != b.prescale) {
    return differs("prescale factor", std::to_string(a.prescale), std::to_string(b.prescale));
  }
  if (a.postscale != b.postscale) {
    return differs("postscale factor", std::to_string(a.postscale), std::to_string(b.postscale));
  }
  if (a.ranks != b.ranks) return differs("ranks", RanksText(a.ranks), RanksText(b.ranks));
  if (a.tensors.size() != b.tensors.size()) {
    return differs("number of tensors", std::to_string(a.tensors.size()),
                   std::to_string(b.tensors.size()));
  }
  const size_t first = FirstDimensionVaries(a.kind) ? 1 : 0;
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const TensorMeta& in_a = a.tensors[i];
    const TensorMeta& in_b = b.tensors[i];
    const std::string which = a.tensors.size() == 1 ? "" : " of tensor " + std::to_string(i);
    if (in_a.dtype != in_b.dtype) {
      return differs(("dtype" + which).c_str(), Name(in_a.dtype), Name(in_b.dtype));
    }
    const bool same =
        in_a.shape.size() == in_b.shape.size() &&
        std::equal(in_a.shape.begin() + std::min(first, in_a.shape.size()), in_a.shape.end(),
                   in_b.shape.begin() + std::min(first, in_b.shape.size()));
    if (!same) {
      return differs(("shape" + which).c_str(), ToString(in_a.shape), ToString(in_b.shape));
    }
  }
  return false;
}

std::vector<std::byte> Encode(const NegotiationMessage& message) {
  ByteWriter out;
  out.Value(static_cast<uint8_t>((message.joined ? kJoined : 0) | (message.recall ? kRecall : 0) |
                                 (message.begins ? kBegins : 0) |
                                 (message.slow_line ? kSlowLine : 0) |
                                 (message.pending ? kPending : 0)));
  out.Varint(message.joins);
  out.Varint(static_cast<uint64_t>(message.fusion_bytes));
  out.Varint(message.missing.size());
  for (uint32_t id : message.missing) out.Varint(id);
  out.Varint(message.stale.size());
  for (uint32_t id : message.stale) out.Varint(id);
  out.Varint(message.committed.size());
  for (uint32_t count : message.committed) out.Varint(count);
  out.Varint(message.withdrawn.size());
  for (const RequestKey& key : message.withdrawn) {
    WriteKind(key.kind, key.host_step, out);
    out.Text(key.name);
  }

  // The bits of the ready requests, then a phase for each of them.
  uint32_t highest = 0;
  for (const auto& known : message.known) highest = std::max(highest, known.cache_id + 1);
  std::vector<uint8_t> bits((highest + 7) / 8);
  for (const auto& known : message.known) bits[known.cache_id / 8] |= 1u << (known.cache_id % 8);
  out.Varint(bits.size());
  for (uint8_t byte : bits) out.Value(byte);
  for (const auto& known : message.known) out.Varint(known.phase);

  out.Varint(message.fresh.size());
  for (const auto& fresh : message.fresh) {
    WriteMeta(fresh.meta, out);
    out.Varint(fresh.phase);
  }
  return out.bytes();
}

Result<NegotiationMessage> DecodeNegotiation(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  NegotiationMessage message;
  const auto flags = in.Value<uint8_t>();
  message.joined = flags & kJoined;
  message.recall = flags & kRecall;
  message.begins = flags & kBegins;
  message.slow_line = flags & kSlowLine;
  message.pending = flags & kPending;
  message.joins = static_cast<uint32_t>(in.Varint());
  message.fusion_bytes = static_cast<int64_t>(in.Varint());
  message.missing.resize(in.Count());
  for (uint32_t& id : message.missing) id = static_cast<uint32_t>(in.Varint());
  message.stale.resize(in.Count());
  for (uint32_t& id : message.stale) id = static_cast<uint32_t>(in.Varint());
  message.committed.resize(in.Count());
  for (uint32_t& count : message.committed) count = static_cast<uint32_t>(in.Varint());
  message.withdrawn.resize(in.Count());
  for (RequestKey& key : message.withdrawn) {
    std::tie(key.kind, key.host_step) = ReadKind(in);
    key.name = in.Text();
  }
  const size_t num_bytes = in.Count();
  for (size_t i = 0; i < num_bytes; ++i) {
    const auto byte = in.Value<uint8_t>();
    for (uint32_t bit = 0; bit < 8; ++bit) {
      if (byte >> bit & 1) message.known.push_back({static_cast<uint32_t>(i * 8 + bit), 0});
    }
  }
  for (auto& known : message.known) known.phase = static_cast<uint32_t>(in.Varint());
  message.fresh.resize(in.Count());
  for (auto& fresh : message.fresh) {
    fresh.meta = ReadMeta(in);
    fresh.phase = static_cast<uint32_t>(in.Varint());
    if (!Valid(fresh.meta)) return Status::InvalidArgument("malformed negotiation message");
  }
  if (!in.AtEnd() || message.fusion_bytes < 0) {
    return Status::InvalidArgument("malformed negotiation message");
  }
  return message;
}

}  // namespace dad
