#include "rendezvous/http_request.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <string_view>

namespace dad {
namespace {

using Clock = std::chrono::steady_clock;

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

Status SystemError(const char* what, int error) {
  return Status::Unavailable(std::string(what) + ": " + std::strerror(error));
}

Status Await(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return Status::Timeout("no answer in time");
    pollfd waiting{fd, events, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(std::min<int64_t>(left, 60'000)));
    if (ready > 0) return Status::Ok();
    if (ready < 0 && errno != EINTR) return SystemError("poll", errno);
  }
}

Status ConnectTo(const addrinfo& address, int fd, Clock::time_point deadline) {
  if (connect(fd, address.ai_addr, address.ai_addrlen) == 0) return Status::Ok();
  if (errno != EINPROGRESS) return SystemError("connect", errno);
  DAD_RETURN_IF_ERROR(Await(fd, POLLOUT, deadline));
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0 ? Status::Ok() : SystemError("connect", error);
}

Result<Socket> Connect(const std::string& host, const std::string& port,
                       Clock::time_point deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return Status::Unavailable(host + ": " + gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, freeaddrinfo);
  Status last = Status::Unavailable(host + ": no address");
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    Socket socket_of(socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (socket_of.fd() < 0) {
      last = SystemError("socket", errno);
      continue;
    }
    last = ConnectTo(*address, socket_of.fd(), deadline);
    if (last.ok()) return socket_of;
  }
  return last;
}

Status SendAll(int fd, std::string_view bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      DAD_RETURN_IF_ERROR(Await(fd, POLLOUT, deadline));
    } else if (errno != EINTR) {
      return SystemError("send", errno);
    }
  }
  return Status::Ok();
}

// HTTP/1.0: the server ends the reply by closing.
Result<std::string> ReceiveAll(int fd, Clock::time_point deadline) {
  std::string bytes;
  char chunk[16384];
  for (;;) {
    const ssize_t got = recv(fd, chunk, sizeof chunk, 0);
    if (got == 0) return bytes;
    if (got > 0) {
      bytes.append(chunk, static_cast<size_t>(got));
      if (bytes.size() > kMostReplyBytes) return Status::Unavailable("the reply has no end");
    } else if (errno == EAGAIN) {
      DAD_RETURN_IF_ERROR(Await(fd, POLLIN, deadline));
    } else if (errno != EINTR) {
      return SystemError("recv", errno);
    }
  }
}

// The value of a header (`name` in lower case, with its colon) in `head`, or empty.
std::string_view HeaderIn(std::string_view head, std::string_view name) {
  for (size_t at = head.find("\r\n"); at != std::string_view::npos; at = head.find("\r\n", at)) {
    at += 2;
    std::string_view line = head.substr(at, head.find("\r\n", at) - at);
    if (line.size() < name.size()) continue;
    if (strncasecmp(line.data(), name.data(), name.size()) != 0) continue;
    line.remove_prefix(name.size());
    while (line.starts_with(' ')) line.remove_prefix(1);
    return line;
  }
  return {};
}

// The value of Content-Length in `head`, or -1.
int64_t ContentLength(std::string_view head) {
  const std::string_view value = HeaderIn(head, "content-length:");
  int64_t length = -1;
  std::from_chars(value.data(), value.data() + value.size(), length);
  return length;
}

}  // namespace

Result<HttpReply> ParseHttpReply(const std::string& bytes) {
  const Status bad = Status::Unavailable("not a complete HTTP reply");
  const size_t end = bytes.find("\r\n\r\n");
  if (end == std::string::npos || !bytes.starts_with("HTTP/1.")) return bad;
  const std::string_view head(bytes.data(), end);
  HttpReply reply;
  const size_t space = head.find(' ');
  if (space == std::string_view::npos) return bad;
  std::from_chars(head.data() + space + 1, head.data() + head.size(), reply.status);
  reply.proof = HeaderIn(head, "x-dad-auth:");
  reply.body = bytes.substr(end + 4);
  const int64_t length = ContentLength(head);
  if (length >= 0) {
    if (reply.body.size() < static_cast<size_t>(length)) return bad;
    reply.body.resize(static_cast<size_t>(length));
  }
  return reply;
}

Result<HttpReply> HttpRequest(const std::string& host, const std::string& port,
                              const std::string& verb, const std::string& path,
                              const std::string& body, const std::string& proof,
                              Clock::time_point deadline) {
  Result<Socket> connected = Connect(host, port, deadline);
  if (!connected.ok()) return connected.status();
  const int fd = connected.value().fd();
  const std::string request = verb + " " + path + " HTTP/1.0\r\nHost: " + host +
                              "\r\nContent-Length: " + std::to_string(body.size()) +
                              (proof.empty() ? "" : "\r\nX-Dad-Auth: " + proof) + "\r\n\r\n" + body;
  DAD_RETURN_IF_ERROR(SendAll(fd, request, deadline));
  Result<std::string> bytes = ReceiveAll(fd, deadline);
  if (!bytes.ok()) return bytes.status();
  return ParseHttpReply(bytes.value());
}

}  // namespace dad
