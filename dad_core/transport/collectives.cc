// The default collectives: every rank sends what it has to every peer that needs it, at once, and
// adds up in rank order. Each takes one one-way delay; they are made for the small agreements of
// start-up, not for gradients.
#include <cstring>
#include <string>

#include "linalg/reduce.h"
#include "transport/transport.h"

namespace dad {
namespace {

// Tags of built-in collectives have this bit; those of SendTo do not.
constexpr uint64_t kBuiltIn = uint64_t{1} << 63;

std::shared_ptr<AlignedBuffer> CopyOf(ByteSpan bytes) {
  auto copy = std::make_shared<AlignedBuffer>(bytes.size());
  if (!bytes.empty()) std::memcpy(copy->data(), bytes.data(), bytes.size());
  return copy;
}

void CopyInto(std::byte* out, ByteSpan bytes) {
  if (!bytes.empty()) std::memcpy(out, bytes.data(), bytes.size());
}

template <typename T>
size_t Total(std::span<const T> counts) {
  size_t total = 0;
  for (T count : counts) total += static_cast<size_t>(count);
  return total;
}

std::string FromRank(const char* what, int peer) {
  return std::string(what) + ": rank " + std::to_string(peer);
}

Status BadArgument(const char* what, const char* why) {
  return Status::InvalidArgument(std::string(what) + ": " + why);
}

}  // namespace

uint64_t Transport::NextTag() {
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  return kBuiltIn | next_tag_++;
}

void Transport::Post(int peer, uint64_t tag, ByteSpan bytes, std::shared_ptr<void> keep) {
  MessageHeader header;
  header.kind = MessageKind::kCollective;
  header.batch = tag;
  GatherBuffer payload;
  payload.Reference(bytes.data(), bytes.size());
  Send(peer, header, std::move(payload), std::move(keep));
}

Result<AlignedBuffer> Transport::Take(int peer, uint64_t tag, Clock::time_point deadline,
                                      const char* what) {
  std::unique_lock<std::mutex> lock(mailbox_mutex_);
  const auto key = std::make_pair(peer, tag);
  const auto arrived = [&] { return mailbox_.contains(key) || lost_.contains(peer); };
  if (!mailbox_changed_.wait_until(lock, deadline, arrived)) {
    return Status::Timeout(FromRank(what, peer) + " did not answer in time");
  }
  // What it sent before it was lost still counts.
  const auto box = mailbox_.find(key);
  if (box == mailbox_.end()) {
    return Status::Aborted(FromRank(what, peer) + " is lost: " + lost_.at(peer).message());
  }
  AlignedBuffer payload = std::move(box->second.front());
  box->second.pop_front();
  if (box->second.empty()) mailbox_.erase(box);
  return payload;
}

Result<AlignedBuffer> Transport::TakeExactly(int peer, uint64_t tag, size_t num_bytes,
                                             Clock::time_point deadline, const char* what) {
  Result<AlignedBuffer> taken = Take(peer, tag, deadline, what);
  if (taken.ok() && taken.value().size() != num_bytes) {
    return Status::FailedPrecondition(FromRank(what, peer) + " sent " +
                                      std::to_string(taken.value().size()) + " bytes, expected " +
                                      std::to_string(num_bytes));
  }
  return taken;
}

Status Transport::AllReduce(const TensorView& inout, ReduceOp op, Millis timeout) {
  const auto mine = CopyOf({inout.bytes(), inout.num_bytes()});
  const std::vector<ByteSpan> blocks(size(), mine->span());
  return ReduceBlocks(blocks, mine, inout, op, timeout, "allreduce");
}

Status Transport::ReduceScatter(const TensorView& in, std::span<const int64_t> counts,
                                const TensorView& out, ReduceOp op, Millis timeout) {
  constexpr const char* kWhat = "reducescatter";
  if (counts.size() != static_cast<size_t>(size())) return BadArgument(kWhat, "counts per rank");
  if (out.num_elements() != counts[rank()]) return BadArgument(kWhat, "size of the output");
  if (static_cast<size_t>(in.num_elements()) != Total(counts) || in.dtype != out.dtype) {
    return BadArgument(kWhat, "size or type of the input");
  }
  const auto mine = CopyOf({in.bytes(), in.num_bytes()});
  std::vector<ByteSpan> blocks;
  const std::byte* at = mine->data();
  for (int64_t count : counts) {
    blocks.emplace_back(at, static_cast<size_t>(count) * SizeOf(in.dtype));
    at += blocks.back().size();
  }
  return ReduceBlocks(blocks, mine, out, op, timeout, kWhat);
}

Status Transport::ReduceBlocks(std::span<const ByteSpan> blocks, std::shared_ptr<void> keep,
                               const TensorView& out, ReduceOp op, Millis timeout,
                               const char* what) {
  if (op == ReduceOp::kAdasum) return BadArgument(what, "transports have no Adasum");
  const auto deadline = Clock::now() + timeout;
  const uint64_t tag = NextTag();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) Post(peer, tag, blocks[peer], keep);
  }
  std::vector<AlignedBuffer> theirs(size());
  std::vector<const void*> inputs(size());
  inputs[rank()] = blocks[rank()].data();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    Result<AlignedBuffer> taken = TakeExactly(peer, tag, out.num_bytes(), deadline, what);
    if (!taken.ok()) return taken.status();
    theirs[peer] = std::move(taken).value();
    inputs[peer] = theirs[peer].data();
  }
  if (out.num_elements() == 0) return Status::Ok();
  ReduceInRankOrder(inputs, out.data, out.num_elements(), out.dtype, op, 1.0, 1.0, size());
  return Status::Ok();
}

Status Transport::AllGatherV(ByteSpan mine, std::span<const size_t> counts,
                             std::span<std::byte> out, Millis timeout) {
  constexpr const char* kWhat = "allgather";
  if (counts.size() != static_cast<size_t>(size())) return BadArgument(kWhat, "counts per rank");
  if (mine.size() != counts[rank()]) return BadArgument(kWhat, "size of the input");
  if (out.size() != Total(counts)) return BadArgument(kWhat, "size of the output");

  const auto deadline = Clock::now() + timeout;
  const uint64_t tag = NextTag();
  const auto copy = CopyOf(mine);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) Post(peer, tag, copy->span(), copy);
  }
  std::byte* at = out.data();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      CopyInto(at, copy->span());
    } else {
      Result<AlignedBuffer> theirs = TakeExactly(peer, tag, counts[peer], deadline, kWhat);
      if (!theirs.ok()) return theirs.status();
      CopyInto(at, theirs.value().span());
    }
    at += counts[peer];
  }
  return Status::Ok();
}

Status Transport::Broadcast(std::span<std::byte> inout, int root, Millis timeout) {
  constexpr const char* kWhat = "broadcast";
  if (root < 0 || root >= size()) return BadArgument(kWhat, "no such root");
  const auto deadline = Clock::now() + timeout;
  const uint64_t tag = NextTag();
  if (rank() == root) {
    const auto copy = CopyOf(inout);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != root) Post(peer, tag, copy->span(), copy);
    }
    return Status::Ok();
  }
  Result<AlignedBuffer> theirs = TakeExactly(root, tag, inout.size(), deadline, kWhat);
  if (!theirs.ok()) return theirs.status();
  CopyInto(inout.data(), theirs.value().span());
  return Status::Ok();
}

Status Transport::AllToAllV(ByteSpan in, std::span<const size_t> send_counts,
                            std::span<std::byte> out, std::span<const size_t> receive_counts,
                            Millis timeout) {
  constexpr const char* kWhat = "alltoall";
  const size_t ranks = static_cast<size_t>(size());
  if (send_counts.size() != ranks || receive_counts.size() != ranks) {
    return BadArgument(kWhat, "counts per rank");
  }
  if (in.size() != Total(send_counts)) return BadArgument(kWhat, "size of the input");
  if (out.size() != Total(receive_counts)) return BadArgument(kWhat, "size of the output");
  if (send_counts[rank()] != receive_counts[rank()]) {
    return BadArgument(kWhat, "counts of this rank to itself differ");
  }

  const auto deadline = Clock::now() + timeout;
  const uint64_t tag = NextTag();
  const auto copy = CopyOf(in);
  ByteSpan to_self;
  size_t offset = 0;
  for (int peer = 0; peer < size(); ++peer) {
    const ByteSpan block(copy->data() + offset, send_counts[peer]);
    offset += block.size();
    if (peer == rank()) {
      to_self = block;
    } else {
      Post(peer, tag, block, copy);
    }
  }
  std::byte* at = out.data();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      CopyInto(at, to_self);
    } else {
      Result<AlignedBuffer> theirs = TakeExactly(peer, tag, receive_counts[peer], deadline, kWhat);
      if (!theirs.ok()) return theirs.status();
      CopyInto(at, theirs.value().span());
    }
    at += receive_counts[peer];
  }
  return Status::Ok();
}

Status Transport::SendTo(int peer, uint64_t tag, ByteSpan bytes, Millis timeout) {
  (void)timeout;  // the copy is sent when possible
  if (peer < 0 || peer >= size() || peer == rank()) return BadArgument("send", "no such peer");
  if ((tag & kBuiltIn) != 0) return BadArgument("send", "tags have 63 bits");
  const auto copy = CopyOf(bytes);
  Post(peer, tag, copy->span(), copy);
  return Status::Ok();
}

Status Transport::ReceiveFrom(int peer, uint64_t tag, std::span<std::byte> bytes, Millis timeout) {
  if (peer < 0 || peer >= size() || peer == rank()) return BadArgument("receive", "no such peer");
  Result<AlignedBuffer> theirs =
      TakeExactly(peer, tag, bytes.size(), Clock::now() + timeout, "receive");
  if (!theirs.ok()) return theirs.status();
  CopyInto(bytes.data(), theirs.value().span());
  return Status::Ok();
}

Status Transport::Barrier(Millis timeout) {
  const std::vector<size_t> nothing(size(), 0);
  return AllGatherV({}, nothing, {}, timeout);
}

Result<std::vector<std::vector<std::byte>>> Transport::AllGatherBlobs(ByteSpan mine,
                                                                      Millis timeout) {
  const auto deadline = Clock::now() + timeout;
  const uint64_t tag = NextTag();
  const auto copy = CopyOf(mine);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) Post(peer, tag, copy->span(), copy);
  }
  std::vector<std::vector<std::byte>> blobs(size());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      blobs[peer].assign(mine.begin(), mine.end());
      continue;
    }
    Result<AlignedBuffer> theirs = Take(peer, tag, deadline, "allgather");
    if (!theirs.ok()) return theirs.status();
    const auto bytes = theirs.value().span();
    blobs[peer].assign(bytes.begin(), bytes.end());
  }
  return blobs;
}

}  // namespace dad
