// The switch of a lab with delay, jitter or loss (tools/netlab): makes a TAP device "eth0" in
// each network namespace named, and carries Ethernet frames between them.
//
//   netlab_relay RATE_BITS DELAY_US JITTER_US LOSS_PPM NAMESPACE...       RATE_BITS 0: no limit
//
// A port is a line of the given rate towards its host, with a queue of 50 ms: a frame leaves
// when those before it have, reaches the host DELAY_US ± JITTER_US later, though never before
// one that left earlier, and is dropped if the queue is full. LOSS_PPM of a million frames are
// lost after they have left, each for itself. What a host sends is shaped by its own kernel.
// Prints "ready" and runs until it is killed; the devices vanish with it.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using std::chrono::microseconds;
using std::chrono::nanoseconds;

constexpr auto kQueue = std::chrono::milliseconds(50);
constexpr size_t kUnlimitedQueueBytes = 64 << 20;  // of a port without a rate
constexpr auto kGrain = microseconds(50);          // frames may be early by this: fewer wake-ups
constexpr size_t kMaxFrame = 66 << 10;             // TCP hands over segments of up to 64 KB unsplit
constexpr int kMaxBatch = 64;

// In front of every frame of such a device; <linux/virtio_net.h> is not C++.
struct VirtioHeader {
  uint8_t flags;
  uint8_t gso_type;  // 0: not a segment to be split
  uint16_t hdr_len;
  uint16_t gso_size;
  uint16_t csum_start;
  uint16_t csum_offset;
};

using Mac = std::array<unsigned char, 6>;

struct Frame {
  Time due;
  std::vector<char> bytes;  // VirtioHeader, then Ethernet
};

struct Port {
  int fd = -1;
  Time line_free;  // when the last frame in the queue has left
  Time last_due;
  std::deque<Frame> queue;
  size_t queued_bytes = 0;
};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "netlab_relay: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

// Makes eth0 in a namespace; this process stays in that namespace. Segments that are `unsplit`
// stand for many packets, which could only be lost together.
int OpenTap(const std::string& name, bool unsplit) {
  const std::string path = "/run/netns/" + name;
  const int ns = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (ns < 0 || setns(ns, CLONE_NEWNET) != 0) Die(path);
  close(ns);
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) Die("/dev/net/tun");
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  std::strcpy(request.ifr_name, "eth0");
  if (ioctl(fd, TUNSETIFF, &request) != 0) Die("TUNSETIFF in " + name);
  const unsigned offload = TUN_F_CSUM | (unsplit ? TUN_F_TSO4 : 0);
  if (ioctl(fd, TUNSETOFFLOAD, offload) != 0) Die("TUNSETOFFLOAD in " + name);
  return fd;
}

// Bytes on the wire. An unsplit segment has its headers once per packet that it stands for.
int64_t WireBytes(const std::vector<char>& frame) {
  VirtioHeader header;
  std::memcpy(&header, frame.data(), sizeof header);
  int64_t bytes = static_cast<int64_t>(frame.size() - sizeof header);
  if (header.gso_type != 0 && header.gso_size > 0) {
    const int64_t packets = (bytes - header.hdr_len + header.gso_size - 1) / header.gso_size;
    bytes += std::max<int64_t>(packets - 1, 0) * header.hdr_len;
  }
  return bytes;
}

struct Line {
  int64_t rate_bits = 0;
  microseconds delay{0};
  microseconds jitter{0};
  int64_t loss_ppm = 0;
};

class Relay {
 public:
  Relay(const Line& line, std::vector<Port> ports) : line_(line), ports_(std::move(ports)) {}

  [[noreturn]] void Run() {
    std::vector<pollfd> waits;
    for (const Port& port : ports_) waits.push_back({port.fd, POLLIN, 0});
    for (;;) {
      const auto wait = Deliver();
      const timespec limit = {static_cast<time_t>(wait.count() / 1000000000),
                              static_cast<long>(wait.count() % 1000000000)};
      ppoll(waits.data(), waits.size(), wait.count() < 0 ? nullptr : &limit, nullptr);
      for (size_t i = 0; i < ports_.size(); ++i) {
        if (waits[i].revents & POLLIN) Receive(i);
      }
    }
  }

 private:
  void Receive(size_t from) {
    for (int i = 0; i < kMaxBatch; ++i) {
      const ssize_t length = read(ports_[from].fd, buffer_.data(), buffer_.size());
      if (length < static_cast<ssize_t>(sizeof(VirtioHeader) + 14)) return;
      const char* ethernet = buffer_.data() + sizeof(VirtioHeader);
      Mac to;
      Mac sender;
      std::memcpy(to.data(), ethernet, 6);
      std::memcpy(sender.data(), ethernet + 6, 6);
      port_of_[sender] = from;
      const std::vector<char> frame(buffer_.data(), buffer_.data() + length);
      if (auto known = port_of_.find(to); known != port_of_.end()) {
        Enqueue(ports_[known->second], frame);
        continue;
      }
      for (size_t port = 0; port < ports_.size(); ++port) {  // a broadcast, or not seen yet
        if (port != from) Enqueue(ports_[port], frame);
      }
    }
  }

  void Enqueue(Port& port, std::vector<char> frame) {
    const Time now = Clock::now();
    Time leaves = std::max(now, port.line_free);
    if (line_.rate_bits > 0) {
      if (leaves - now > kQueue) return;
      leaves += nanoseconds(WireBytes(frame) * 8 * 1000000000 / line_.rate_bits);
    } else if (port.queued_bytes > kUnlimitedQueueBytes) {
      return;
    }
    port.line_free = leaves;
    if (line_.loss_ppm > 0 && Below(1'000'000) < line_.loss_ppm) return;
    port.queued_bytes += frame.size();
    const auto jitter = microseconds(Below(2 * line_.jitter.count() + 1)) - line_.jitter;
    port.last_due = std::max(port.last_due, leaves + line_.delay + jitter);
    port.queue.push_back({port.last_due, std::move(frame)});
  }

  // Hands over what is due. How long until there is more; negative: nothing waits.
  nanoseconds Deliver() {
    const Time now = Clock::now();
    nanoseconds wait(-1);
    for (Port& port : ports_) {
      while (!port.queue.empty() && port.queue.front().due <= now + kGrain) {
        const std::vector<char>& bytes = port.queue.front().bytes;
        (void)!write(port.fd, bytes.data(), bytes.size());  // a host that is down loses it
        port.queued_bytes -= bytes.size();
        port.queue.pop_front();
      }
      if (port.queue.empty()) continue;
      const nanoseconds left = port.queue.front().due - now;
      if (wait.count() < 0 || left < wait) wait = left;
    }
    return wait;
  }

  int64_t Below(int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(random_);
  }

  const Line line_;
  std::mt19937_64 random_;  // the same in every run
  std::vector<Port> ports_;
  std::map<Mac, size_t> port_of_;
  std::vector<char> buffer_ = std::vector<char>(sizeof(VirtioHeader) + kMaxFrame);
};

}  // namespace

int main(int argc, char** argv) {
  constexpr int kFirstName = 5;
  if (argc <= kFirstName) {
    std::fprintf(stderr,
                 "usage: netlab_relay RATE_BITS DELAY_US JITTER_US LOSS_PPM NAMESPACE...\n");
    return 2;
  }
  Line line;
  line.rate_bits = std::atoll(argv[1]);
  line.delay = microseconds(std::atoll(argv[2]));
  line.jitter = microseconds(std::atoll(argv[3]));
  line.loss_ppm = std::atoll(argv[4]);
  std::vector<Port> ports(argc - kFirstName);
  const int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  for (int i = kFirstName; i < argc; ++i) {
    ports[i - kFirstName].fd = OpenTap(argv[i], /*unsplit=*/line.loss_ppm == 0);
  }
  if (setns(home, CLONE_NEWNET) != 0) Die("setns");

  // A switch does not wait for the work of the hosts.
  prctl(PR_SET_TIMERSLACK, 1);
  sched_param priority{};
  priority.sched_priority = 1;
  sched_setscheduler(0, SCHED_RR, &priority);

  std::puts("ready");
  std::fclose(stdout);
  Relay(line, std::move(ports)).Run();
}
