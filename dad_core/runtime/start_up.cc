#include "runtime/start_up.h"

#include <algorithm>
#include <chrono>

#include "exchange/collective/dense_ring.h"
#include "exchange/device/bench.h"
#include "util/byte_io.h"
#include "util/log.h"

namespace dad {
namespace {

struct Card {
  std::string version;
  int64_t fusion_bytes = 0;
  int64_t direct_bytes = 0;
  int64_t ring_bytes = 0;
  int64_t pack = 0;
  int64_t cache_capacity = 0;
  std::string process_sets;
  int32_t cpu_level = 0;
  bool hierarchical = false;
  bool join_strict = false;
  std::string hostname;
  std::string lacks_kernels;  // empty: it has what methods need on a device
  bool has_products = false;
  std::string device_kind;
};

std::string Describe(const std::vector<std::vector<int>>& process_sets) {
  std::string text;
  for (const std::vector<int>& ranks : process_sets) {
    text += (text.empty() ? "" : " ") + ToString(Shape(ranks.begin(), ranks.end()));
  }
  return text.empty() ? "none" : text;
}

std::vector<std::byte> Encode(const Card& card) {
  ByteWriter out;
  out.Text(card.version);
  out.Value(card.fusion_bytes);
  out.Value(card.direct_bytes);
  out.Value(card.ring_bytes);
  out.Value(card.pack);
  out.Value(card.cache_capacity);
  out.Text(card.process_sets);
  out.Value(card.cpu_level);
  out.Value(static_cast<uint8_t>(card.hierarchical));
  out.Value(static_cast<uint8_t>(card.join_strict));
  out.Text(card.hostname);
  out.Text(card.lacks_kernels);
  out.Value(static_cast<uint8_t>(card.has_products));
  out.Text(card.device_kind);
  return out.bytes();
}

Card Decode(ByteSpan bytes) {
  ByteReader in(bytes);
  Card card;
  card.version = in.Text();
  card.fusion_bytes = in.Value<int64_t>();
  card.direct_bytes = in.Value<int64_t>();
  card.ring_bytes = in.Value<int64_t>();
  card.pack = in.Value<int64_t>();
  card.cache_capacity = in.Value<int64_t>();
  card.process_sets = in.Text();
  card.cpu_level = in.Value<int32_t>();
  card.hierarchical = in.Value<uint8_t>() != 0;
  card.join_strict = in.Value<uint8_t>() != 0;
  card.hostname = in.Text();
  card.lacks_kernels = in.Text();
  card.has_products = in.Value<uint8_t>() != 0;
  card.device_kind = in.Text();
  return card;
}

// A ring's sums have other last bits than those of owners, and they depend on how tensors are cut.
// If bits must not depend on timing, neither a measured round trip nor tuning may decide that.
int64_t RingBytes(const Options& options) {
  const bool by_the_clock = options.ring_bytes < 0 || options.autotune;
  return options.deterministic && by_the_clock ? 0 : options.ring_bytes;
}

// On the device if all ranks can; the first rank that cannot is named. All ranks repeat products,
// so their bits must be the same everywhere.
DeviceMethods AgreeOnDevice(const std::vector<Card>& cards, std::shared_ptr<DeviceBench> bench) {
  DeviceMethods methods;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    const Card& card = cards[rank];
    const std::string who = "rank " + std::to_string(rank) + ": ";
    if (!card.lacks_kernels.empty()) return {nullptr, false, who + card.lacks_kernels};
    if (!methods.why.empty()) continue;
    if (!card.has_products) {
      methods.why = who + card.device_kind;
    } else if (card.device_kind != cards[0].device_kind) {
      methods.why = who + card.device_kind + ", on rank 0 " + cards[0].device_kind;
    }
  }
  methods.bench = std::move(bench);
  methods.products = methods.why.empty();
  return methods;
}

int64_t WallMicros() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

struct Distance {  // to rank 0
  int64_t clock_offset_us = 0;
  int64_t round_trip_us = 0;
};

// Every rank asks rank 0 for the time several times. The quickest answer counts, because others
// waited for a busy machine. Half of the round trip is subtracted.
Result<Distance> AskRankZero(Transport& transport, std::chrono::milliseconds timeout) {
  constexpr uint64_t kTag = 0xc10c;
  constexpr int kAsks = 4;
  int64_t wall = 0;
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(&wall, 1));
  Distance nearest;
  for (int ask = 0; ask < kAsks; ++ask) {
    if (transport.rank() != 0) {
      const int64_t asked = WallMicros();
      DAD_RETURN_IF_ERROR(transport.SendTo(0, kTag, bytes, timeout));
      DAD_RETURN_IF_ERROR(transport.ReceiveFrom(0, kTag, bytes, timeout));
      const int64_t answered = WallMicros();
      if (ask > 0 && answered - asked >= nearest.round_trip_us) continue;
      nearest = {wall - (asked + answered) / 2, answered - asked};
      continue;
    }
    for (int peer = 1; peer < transport.size(); ++peer) {
      DAD_RETURN_IF_ERROR(transport.ReceiveFrom(peer, kTag, bytes, timeout));
      wall = WallMicros();
      DAD_RETURN_IF_ERROR(transport.SendTo(peer, kTag, bytes, timeout));
    }
  }
  return nearest;
}

// What -1 stands for; -1 if the line is to be measured. The farthest rank counts, because all ranks
// wait for every line of a ring.
Result<int64_t> RingBytesByDistance(Transport& transport, const Distance& mine,
                                    std::chrono::milliseconds timeout) {
  constexpr int64_t kFarUs = 2000;
  ByteWriter out;
  out.Value(mine.round_trip_us);
  auto blobs = transport.AllGatherBlobs(out.bytes(), timeout);
  if (!blobs.ok()) return blobs.status();
  int64_t farthest_us = 0;
  for (const auto& blob : blobs.value()) {
    farthest_us = std::max(farthest_us, ByteReader(blob).Value<int64_t>());
  }
  return farthest_us >= kFarUs ? kRingBytesPerRank : -1;
}

}  // namespace

Result<StartUp> AgreeOnStart(Transport& transport, const Options& mine, const World& world,
                             const std::vector<std::vector<int>>& process_sets) {
  const std::chrono::milliseconds timeout(static_cast<int64_t>(mine.start_timeout_seconds * 1000));
  const Result<std::shared_ptr<DeviceBench>> bench =
      DeviceBench::Find(world.local_rank, DeviceBench::Files::FromEnvironment(world.plugin_dir));
  const Card card{DAD_VERSION,
                  mine.fusion_bytes,
                  mine.direct_bytes,
                  RingBytes(mine),
                  mine.pack,
                  mine.cache_capacity,
                  Describe(process_sets),
                  static_cast<int32_t>(BestCpuLevel()),
                  mine.hierarchical_allreduce,
                  mine.join_strict,
                  world.hostname,
                  bench.status().message(),
                  bench.ok() && bench.value()->has_products(),
                  bench.ok() ? bench.value()->kind() : ""};
  auto blobs = transport.AllGatherBlobs(Encode(card), timeout);
  if (!blobs.ok()) return blobs.status();

  std::vector<Card> cards = {Decode(blobs.value()[0])};
  const Card first = cards[0];
  int32_t cpu_level = first.cpu_level;
  StartUp start;
  start.hostnames = {first.hostname};
  for (int rank = 1; rank < transport.size(); ++rank) {
    const Card other = cards.emplace_back(Decode(blobs.value()[static_cast<size_t>(rank)]));
    cpu_level = std::min(cpu_level, other.cpu_level);
    start.hostnames.push_back(other.hostname);
    if (other.version != first.version) {
      return Status::FailedPrecondition("ranks run different versions of dad: " + first.version +
                                        " on rank 0, " + other.version + " on rank " +
                                        std::to_string(rank));
    }
    if (other.process_sets != first.process_sets) {
      return Status::FailedPrecondition(
          "ranks disagree on the process sets of init(): " + first.process_sets + " on rank 0, " +
          other.process_sets + " on rank " + std::to_string(rank));
    }
  }
  start.device_methods = AgreeOnDevice(cards, bench.ok() ? bench.value() : nullptr);
  start.options = mine;
  start.cpu_level = static_cast<CpuLevel>(cpu_level);
  if (first.fusion_bytes != mine.fusion_bytes || first.direct_bytes != mine.direct_bytes ||
      first.ring_bytes != card.ring_bytes || first.pack != mine.pack ||
      first.cache_capacity != mine.cache_capacity ||
      first.hierarchical != mine.hierarchical_allreduce || first.join_strict != mine.join_strict) {
    DAD_LOG(Warning) << "options differ from those of rank 0, which count: fusion_bytes "
                     << first.fusion_bytes << ", direct_bytes " << first.direct_bytes
                     << ", ring_bytes " << first.ring_bytes << ", pack " << first.pack
                     << ", cache_capacity " << first.cache_capacity << ", hierarchical_allreduce "
                     << first.hierarchical << ", join_strict " << first.join_strict;
  }
  start.options.hierarchical_allreduce = first.hierarchical;
  start.options.join_strict = first.join_strict;
  start.options.fusion_bytes = first.fusion_bytes;
  start.options.direct_bytes = first.direct_bytes;
  start.options.cache_capacity = first.cache_capacity;
  start.options.pack = first.pack;
  Result<Distance> distance = AskRankZero(transport, timeout);
  if (!distance.ok()) return distance.status();
  start.clock_offset_us = distance.value().clock_offset_us;
  start.options.ring_bytes = first.ring_bytes;
  if (first.ring_bytes < 0) {
    Result<int64_t> ring_bytes = RingBytesByDistance(transport, distance.value(), timeout);
    if (!ring_bytes.ok()) return ring_bytes.status();
    start.options.ring_bytes = ring_bytes.value();
  }
  return start;
}

}  // namespace dad
