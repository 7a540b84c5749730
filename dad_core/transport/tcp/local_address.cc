#include "transport/tcp/local_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <set>
#include <sstream>

namespace dad::tcp {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

std::string Numeric(const sockaddr* address) {
  char text[NI_MAXHOST] = "";
  const socklen_t length =
      address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

AddressList Resolve(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) found = nullptr;
  return AddressList(found, freeaddrinfo);
}

bool IsUsable(const sockaddr* address, int family) {
  if (address == nullptr || address->sa_family != family) return false;
  // A link-local address is useless without its interface.
  return family != AF_INET6 ||
         !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

Result<std::string> OfInterfaces(const std::string& interfaces) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    return Status::Unavailable(std::string("getifaddrs: ") + std::strerror(errno));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owned(list, freeifaddrs);
  std::stringstream names(interfaces);
  for (std::string name; std::getline(names, name, ',');) {
    for (const int family : {AF_INET, AF_INET6}) {
      for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
        if (name == entry->ifa_name && IsUsable(entry->ifa_addr, family)) {
          return Numeric(entry->ifa_addr);
        }
      }
    }
  }
  std::set<std::string> present;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (IsUsable(entry->ifa_addr, AF_INET)) present.insert(entry->ifa_name);
  }
  std::string message = "no interface '" + interfaces + "' with an address; this host has:";
  for (const std::string& name : present) message += " " + name;
  return Status::Unavailable(message);
}

// The local end of a route to `to`, or empty. Connecting a datagram socket sends
// nothing.
std::string RouteTo(const addrinfo& to) {
  const int fd = socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  const bool found = connect(fd, to.ai_addr, to.ai_addrlen) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0;
  close(fd);
  return found ? Numeric(reinterpret_cast<const sockaddr*>(&local)) : "";
}

}  // namespace

Result<std::string> LocalAddress(const World& world, const std::string& interfaces) {
  if (!interfaces.empty()) return OfInterfaces(interfaces);

  constexpr std::string_view kHttp = "http://";
  if (world.rendezvous.starts_with(kHttp)) {
    std::string server = world.rendezvous.substr(kHttp.size());
    const size_t colon = server.rfind(':');
    const std::string port = colon == std::string::npos ? "80" : server.substr(colon + 1);
    server.resize(std::min(colon, server.size()));
    const AddressList addresses = Resolve(server, port);
    for (const addrinfo* to = addresses.get(); to != nullptr; to = to->ai_next) {
      if (std::string local = RouteTo(*to); !local.empty()) return local;
    }
    return Status::Unavailable("no route to the rendezvous server " + server);
  }

  if (world.local_size == world.size) return std::string("127.0.0.1");
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  const AddressList addresses = Resolve(name, "0");
  if (addresses == nullptr) {
    return Status::Unavailable(std::string("the name of this host, ") + name +
                               ", has no address; set DAD_GLOO_IFACE");
  }
  return Numeric(addresses->ai_addr);
}

}  // namespace dad::tcp
