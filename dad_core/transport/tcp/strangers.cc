#include "transport/tcp/strangers.h"

#include <netdb.h>
#include <sys/socket.h>

#include "util/log.h"

namespace dad::tcp {
namespace {

constexpr size_t kMostNamed = 64;

}  // namespace

std::string SourceOf(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  char text[NI_MAXHOST] = "";
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  getnameinfo(reinterpret_cast<sockaddr*>(&address), length, text, sizeof text, nullptr, 0,
              NI_NUMERICHOST);
  return text;
}

void Strangers::Refuse(const std::string& source, const std::string& why) {
  ++count_;
  if (named_.size() >= kMostNamed || !named_.insert(source).second) return;
  DAD_LOG(Warning) << "refused a connection from " << (source.empty() ? "a host" : source) << ": "
                   << why << " (further ones from there are counted only; docs/security.md)";
}

}  // namespace dad::tcp
