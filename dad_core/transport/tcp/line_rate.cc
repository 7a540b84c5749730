#include "transport/tcp/line_rate.h"

// Not netinet/tcp.h, whose tcp_info is an older one.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace dad::tcp {

// Divides by the time that bytes were in flight. tcpi_delivery_rate would cover only the last few
// packets, which often belong to a small message.
double LineRateOf(int fd) {
  constexpr auto kEnough = 256 * 1024;  // its window has opened by then
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  const bool known =
      size >= offsetof(tcp_info, tcpi_sndbuf_limited) + sizeof info.tcpi_sndbuf_limited;
  if (!known || info.tcpi_bytes_acked < kEnough) return 0;
  // Subtracts the time that the receiver or the socket's own memory held it up.
  const auto held_up = info.tcpi_rwnd_limited + info.tcpi_sndbuf_limited;
  const auto microseconds = info.tcpi_busy_time - std::min(held_up, info.tcpi_busy_time);
  const double seen = static_cast<double>(info.tcpi_bytes_acked) * 1e6 /
                      static_cast<double>(std::max<decltype(microseconds)>(microseconds, 1));
  // A window that still opens has not reached the limit of the line: the time was spent in round
  // trips. Its present size is a better estimate then; otherwise a long line would pass for a slow
  // one.
  constexpr uint32_t kNotMet = 0x7fffffff;
  if (info.tcpi_snd_ssthresh < kNotMet) return seen;
  const double window = static_cast<double>(info.tcpi_snd_cwnd) * info.tcpi_snd_mss;
  return std::max(seen, window * 1e6 / std::max<uint32_t>(info.tcpi_rtt, 1));
}

double RecentRateOf(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  const bool known =
      size >= offsetof(tcp_info, tcpi_delivery_rate) + sizeof info.tcpi_delivery_rate;
  return known ? static_cast<double>(info.tcpi_delivery_rate) : 0;
}

void LimitUnsent(int fd, size_t num_bytes) {
  const int limit = static_cast<int>(num_bytes);
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &limit, sizeof limit);
}

bool LeavesHost(int fd) {
  sockaddr_storage ours{};
  sockaddr_storage theirs{};
  socklen_t size = sizeof ours;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&ours), &size) != 0) return true;
  size = sizeof theirs;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &size) != 0) return true;
  if (ours.ss_family != theirs.ss_family) return true;
  if (ours.ss_family == AF_INET) {
    return reinterpret_cast<sockaddr_in*>(&ours)->sin_addr.s_addr !=
           reinterpret_cast<sockaddr_in*>(&theirs)->sin_addr.s_addr;
  }
  if (ours.ss_family != AF_INET6) return false;
  return std::memcmp(&reinterpret_cast<sockaddr_in6*>(&ours)->sin6_addr,
                     &reinterpret_cast<sockaddr_in6*>(&theirs)->sin6_addr, sizeof(in6_addr)) != 0;
}

}  // namespace dad::tcp
