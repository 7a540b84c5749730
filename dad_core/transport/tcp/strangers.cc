#include "transport/tcp/strangers.h"

#include <netdb.h>
#include <sys/socket.h>

#include <set>

#include "util/log.h"
#include "util/mutex.h"

namespace dad::tcp {
namespace {

constexpr size_t kMostNamed = 64;

// Ranks connect again in each init().
bool IsNew(const std::string& source) {
  static Mutex mutex;
  static auto* named = new std::set<std::string>;
  const MutexLock lock(mutex);
  return named->size() < kMostNamed && named->insert(source).second;
}

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
  if (!IsNew(source)) return;
  DAD_LOG(Warning) << "refused a connection from " << (source.empty() ? "a host" : source) << ": "
                   << why << " (further ones from there are counted only; docs/security.md)";
}

}  // namespace dad::tcp
