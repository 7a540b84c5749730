// What a worker reports: statistics, and what its rank is doing.
#include <unistd.h>

#include <algorithm>
#include <future>
#include <numeric>

#include "runtime/worker.h"

namespace dad {

void Worker::CallOnWorker(std::function<void()> call) {
  std::promise<void> done;
  inbox_->Post(CallEvent{[&] {
    call();
    done.set_value();
  }});
  done.get_future().wait();
}

std::vector<Wanted> Worker::GetWanted() {
  std::vector<Wanted> wanted;
  CallOnWorker([&] {
    for (const auto& [id, slot] : lanes_) {
      for (Wanted& one : slot.lane->WantedHere()) wanted.push_back(std::move(one));
    }
  });
  return wanted;
}

void Worker::Inspect(Inquiry::Done done) {
  inbox_->Post(CallEvent{[this, done = std::move(done)] {
    std::vector<int> ranks(static_cast<size_t>(transport_->size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    inquiry_.Ask(ranks, done, Clock::now());
  }});
}

Snapshot Worker::Look() {
  const Clock::time_point now = Clock::now();
  const auto since = [now](Clock::time_point at) {
    return at == Clock::time_point() ? -1.0 : std::chrono::duration<double>(now - at).count();
  };
  Snapshot snapshot;
  snapshot.rank = transport_->rank();
  snapshot.hostname = hostname_;
  snapshot.pid = getpid();
  snapshot.error = health().message();
  snapshot.joined = join_ != nullptr;
  if (last_submit_ != Clock::time_point()) {
    snapshot.last_submitted = std::string(Name(last_kind_)) + " \"" + last_submitted_ + "\"";
  }
  snapshot.since_submit = since(last_submit_);
  snapshot.since_result = since(last_result_);
  Clock::time_point last_cycle;
  for (const auto& [id, slot] : lanes_) {
    slot.lane->Describe(snapshot);
    snapshot.negotiations += slot.lane->num_negotiations();
    last_cycle = std::max(last_cycle, slot.lane->last_cycle());
  }
  snapshot.since_cycle = since(last_cycle);
  snapshot.num_requests = static_cast<int64_t>(snapshot.requests.size());
  snapshot.num_batches = static_cast<int64_t>(snapshot.batches.size());
  snapshot.num_missing = static_cast<int64_t>(snapshot.missing.size());
  const auto oldest_first = [](const Snapshot::Open& a, const Snapshot::Open& b) {
    return a.seconds > b.seconds;
  };
  std::sort(snapshot.requests.begin(), snapshot.requests.end(), oldest_first);
  std::sort(snapshot.batches.begin(), snapshot.batches.end(), oldest_first);
  return snapshot;
}

void Worker::SendTo(int rank, MessageKind kind, uint64_t number,
                    std::span<const std::byte> payload) {
  MessageHeader header;
  header.kind = kind;
  header.batch = number;
  GatherBuffer bytes;
  bytes.Append(payload);
  transport_->Send(rank, header, std::move(bytes), nullptr);
}

Stats Worker::GetStats() {
  Stats stats;
  CallOnWorker([&] { stats = CollectStats(); });
  return stats;
}

Stats Worker::CollectStats() {
  Stats stats;
  const TransportCounters counters = transport_->counters();
  stats.wire_bytes_sent = counters.bytes_sent - counters_at_reset_.bytes_sent;
  stats.wire_bytes_received = counters.bytes_received - counters_at_reset_.bytes_received;
  stats.messages_sent = counters.messages_sent - counters_at_reset_.messages_sent;
  stats.line_bytes_per_second = transport_->LineRate();
  stats.payload_bytes_sent = payload_sent_;
  stats.control_bytes_sent = stats.wire_bytes_sent - payload_sent_;
  for (const auto& [id, slot] : lanes_) {
    stats.negotiations += slot.lane->num_negotiations();
    stats.predicted_batches += slot.lane->num_predicted();
    const SlowestRank slowest = slot.lane->executor().slowest();
    if (slowest.seconds > stats.slowest.seconds) stats.slowest = slowest;
    for (const auto& [tensor, traffic] : slot.lane->executor().traffic()) {
      stats.tensors.push_back({tensor.name, tensor.host_step, traffic.steps, traffic.sent,
                               traffic.received, traffic.device, traffic.dense, traffic.effective,
                               traffic.captured, traffic.seconds, traffic.recent,
                               /*hosts_bytes_sent=*/0, traffic.worst});
      stats.steps = std::max(stats.steps, traffic.steps);
      stats.device_bytes += traffic.device;
      stats.dense_bytes += traffic.dense;
    }
  }
  stats.negotiations -= negotiations_at_reset_;
  stats.predicted_batches -= predicted_at_reset_;
  return stats;
}

void Worker::ResetStats() {
  CallOnWorker([this] {
    const Stats now = CollectStats();
    counters_at_reset_ = transport_->counters();
    payload_sent_ = 0;
    negotiations_at_reset_ += now.negotiations;
    predicted_at_reset_ += now.predicted_batches;
    for (auto& [id, slot] : lanes_) slot.lane->executor().ResetTraffic();
  });
}

}  // namespace dad
