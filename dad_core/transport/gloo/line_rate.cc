#include "transport/gloo/line_rate.h"

// Not netinet/tcp.h: its tcp_info is an older one.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace dad::gloo_transport {

// By the time that bytes were on their way. tcpi_delivery_rate would be of the last few packets
// only, which are often those of a small message.
double LineRateOf(int fd) {
  constexpr auto kEnough = 256 * 1024;  // its window has opened by then
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  const bool known =
      size >= offsetof(tcp_info, tcpi_sndbuf_limited) + sizeof info.tcpi_sndbuf_limited;
  if (!known || info.tcpi_bytes_acked < kEnough) return 0;
  const auto bytes = static_cast<double>(info.tcpi_bytes_acked);
  // Less what the receiver or the socket's own memory held up, and less the time in which the
  // window opened, a round trip for each doubling: else a long line would pass for a slow one.
  constexpr double kFirstWindow = 14'600;
  const double opening = info.tcpi_min_rtt * std::log2(bytes / kFirstWindow);
  const auto held_up = static_cast<double>(info.tcpi_rwnd_limited + info.tcpi_sndbuf_limited);
  const double microseconds = static_cast<double>(info.tcpi_busy_time) - held_up - opening;
  return bytes * 1e6 / std::max(microseconds, 1.0);
}

}  // namespace dad::gloo_transport
