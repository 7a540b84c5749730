// How long a ping waits on a line that is full in both directions. In a lab (tools/netlab):
//
//   tools/netlab up 2 1mbit 10
//   tools/netlab run build/benchmarks/dad_ping_wait file:///tmp/fresh_directory 30
//
// The second argument is the time in seconds. Each rank sends 1 MB messages one after the other,
// and a ping five times a second, which the other answers as an engine does.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dad/engine.h"
#include "transport/registry.h"
#include "transport/transport.h"

namespace {

using namespace dad;
using Clock = std::chrono::steady_clock;

constexpr size_t kBulkBytes = 1 << 20;
constexpr auto kBetweenPings = std::chrono::milliseconds(200);

class Answers final : public MessageSink {
 public:
  explicit Answers(Transport* transport) : transport_(transport) {}

  void Deliver(int peer, const MessageHeader& header, AlignedBuffer) override {
    if (header.kind == MessageKind::kPing) {
      MessageHeader pong;
      pong.kind = MessageKind::kPong;
      pong.batch = header.batch;
      transport_->Send(peer, pong, {}, nullptr);
    } else if (header.kind == MessageKind::kPong) {
      const std::chrono::duration<double> waited =
          Clock::now().time_since_epoch() - Clock::duration(static_cast<int64_t>(header.batch));
      std::lock_guard lock(mutex_);
      waits_.push_back(waited.count());
    } else {
      std::lock_guard lock(mutex_);
      ++bulk_;
    }
  }
  void PeerLost(int, const Status&) override {}

  std::vector<double> waits() {
    std::lock_guard lock(mutex_);
    return waits_;
  }
  int bulk() {
    std::lock_guard lock(mutex_);
    return bulk_;
  }

 private:
  Transport* const transport_;
  std::mutex mutex_;
  std::vector<double> waits_;
  int bulk_ = 0;
};

int Fail(const Status& status) {
  std::fprintf(stderr, "ping_wait: %s\n", status.ToString().c_str());
  return 1;
}

const char* Needed(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "0" : value;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: ping_wait RENDEZVOUS SECONDS [DIRECTORY_OF_PLUGINS]\n");
    return 2;
  }
  World world;
  world.rank = std::atoi(Needed("RANK"));
  world.size = 2;
  world.rendezvous = argv[1];
  world.plugin_dir = argc > 3 ? argv[3] : DAD_PLUGIN_DIR;
  Options options;
  options.interface = Needed("DAD_GLOO_IFACE");
  Result<std::unique_ptr<Transport>> connected = ConnectTransport("gloo", world, options);
  if (!connected.ok()) return Fail(connected.status());
  Transport& transport = *connected.value();
  Answers answers(&transport);
  transport.SetSink(&answers);

  const auto end = Clock::now() + std::chrono::seconds(std::atoi(argv[2]));
  auto bytes = std::make_shared<std::vector<std::byte>>(kBulkBytes);
  std::vector<std::weak_ptr<void>> queued;
  int pings = 0;
  while (Clock::now() < end) {
    // Two are queued at any time.
    std::erase_if(queued, [](const auto& message) { return message.expired(); });
    while (queued.size() < 2) {
      auto pin = std::make_shared<std::shared_ptr<void>>(bytes);
      GatherBuffer payload;
      payload.Reference(bytes->data(), bytes->size());
      queued.push_back(pin);
      transport.Send(1 - world.rank, MessageHeader(), std::move(payload), std::move(pin));
    }
    MessageHeader ping;
    ping.kind = MessageKind::kPing;
    ping.batch = static_cast<uint64_t>(Clock::now().time_since_epoch().count());
    transport.Send(1 - world.rank, ping, {}, nullptr);
    ++pings;
    std::this_thread::sleep_for(kBetweenPings);
  }
  std::vector<double> waits = answers.waits();
  std::sort(waits.begin(), waits.end());
  const double longest = waits.empty() ? -1 : waits.back();
  const double middle = waits.empty() ? -1 : waits[waits.size() / 2];
  std::printf(
      "rank %d: %d pings, %zu answered, round trip median %.3f s, longest %.3f s; %.1f MB came\n",
      world.rank, pings, waits.size(), middle, longest,
      static_cast<double>(transport.counters().bytes_received) / 1e6);
  std::fflush(stdout);
  transport.SetSink(nullptr);
  std::_Exit(0);
}
