#include "transport/tcp/mesh.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gloo/common/error.h>
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "util/sha256.h"

namespace dad::tcp {
namespace {

using Clock = Mesh::Clock;
using std::chrono::milliseconds;

constexpr size_t kAddressBytes = 128;  // sockaddr_storage
constexpr size_t kNameBytes = 16;
// The most connections that have not proven anything. If there is one more, the oldest is closed: a
// rank proves itself in a few round trips, and retries if it was too slow.
constexpr size_t kMostStrangers = 256;
constexpr std::chrono::seconds kHandshakeSeconds{10};
constexpr milliseconds kBetweenDials{50};
constexpr milliseconds kBetweenChecks{300};
// The most to accept in one turn, so that a flood does not keep us from the present connections.
constexpr int kAcceptsPerTurn = 64;

static_assert(sizeof(sockaddr_storage) <= kAddressBytes);

socklen_t LengthOf(const sockaddr_storage& address) {
  return address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

sockaddr_storage DecodeAddress(const std::string& bytes) {
  sockaddr_storage address{};
  std::memcpy(&address, bytes.data(), std::min(bytes.size(), sizeof address));
  return address;
}

std::string Printed(const sockaddr_storage& address) {
  char host[NI_MAXHOST] = "?";
  char port[NI_MAXSERV] = "?";
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), LengthOf(address), host, sizeof host,
              port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  return address.ss_family == AF_INET6 ? "[" + std::string(host) + "]:" + port
                                       : std::string(host) + ":" + port;
}

Status SystemError(const std::string& what, int error) {
  return Status::Unavailable(what + ": " + std::strerror(error));
}

// ---- gloo's view of us: addresses, and nothing to send with

class MeshAddress final : public ::gloo::transport::Address {
 public:
  explicit MeshAddress(const Mesh* mesh) : mesh_(mesh) {}
  std::string str() const override { return "a rank of dad"; }
  std::vector<char> bytes() const override { return mesh_->OwnAddress(); }

 private:
  const Mesh* const mesh_;
};

class MeshPair final : public ::gloo::transport::Pair {
 public:
  MeshPair(Mesh* mesh, int peer) : mesh_(mesh), peer_(peer), address_(mesh) {}

  const ::gloo::transport::Address& address() const override { return address_; }
  void connect(const std::vector<char>& address) override { mesh_->SetAddress(peer_, address); }
  void close() override {}
  void setSync(bool, bool) override {}
  std::unique_ptr<::gloo::transport::Buffer> createSendBuffer(int, void*, size_t) override {
    Refuse();
  }
  std::unique_ptr<::gloo::transport::Buffer> createRecvBuffer(int, void*, size_t) override {
    Refuse();
  }
  void send(::gloo::transport::UnboundBuffer*, uint64_t, size_t, size_t) override { Refuse(); }
  void recv(::gloo::transport::UnboundBuffer*, uint64_t, size_t, size_t) override { Refuse(); }

 private:
  [[noreturn]] static void Refuse() {
    throw ::gloo::IoException("dad's own frames carry the data");
  }

  Mesh* const mesh_;
  const int peer_;
  const MeshAddress address_;
};

class MeshContext final : public ::gloo::transport::Context {
 public:
  MeshContext(Mesh* mesh, int rank, int size) : Context(rank, size), mesh_(mesh) {}

  std::unique_ptr<::gloo::transport::Pair>& createPair(int peer) override {
    pairs_[static_cast<size_t>(peer)] = std::make_unique<MeshPair>(mesh_, peer);
    return pairs_[static_cast<size_t>(peer)];
  }
  std::unique_ptr<::gloo::transport::UnboundBuffer> createUnboundBuffer(void*, size_t) override {
    throw ::gloo::IoException("dad's own frames carry the data");
  }

 private:
  Mesh* const mesh_;
};

class MeshDevice final : public ::gloo::transport::Device {
 public:
  explicit MeshDevice(Mesh* mesh) : mesh_(mesh) {}
  std::string str() const override { return "dad"; }
  const std::string& getPCIBusID() const override { return bus_; }
  std::shared_ptr<::gloo::transport::Context> createContext(int rank, int size) override {
    return std::make_shared<MeshContext>(mesh_, rank, size);
  }

 private:
  Mesh* const mesh_;
  const std::string bus_;
};

}  // namespace

OwnedSocket::~OwnedSocket() {
  if (fd_ >= 0) close(fd_);
}

OwnedSocket& OwnedSocket::operator=(OwnedSocket&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) close(fd_);
    fd_ = other.Release();
  }
  return *this;
}

int OwnedSocket::Release() { return std::exchange(fd_, -1); }

Mesh::Mesh(HandshakeTerms terms, Clock::time_point deadline)
    : terms_([&terms] {
        terms.listener = RandomBytes(kNameBytes);
        return std::move(terms);
      }()),
      deadline_(deadline),
      peers_(static_cast<size_t>(terms_.size)) {}

Mesh::~Mesh() = default;

Status Mesh::Listen(const std::string& address, int port) {
  if (port > 65535) {
    return Status::InvalidArgument("DAD_PORT leaves no port for this rank: it would be " +
                                   std::to_string(port));
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(address.c_str(), nullptr, &hints, &found); error != 0) {
    return Status::Unavailable(address + ": " + gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, freeaddrinfo);
  sockaddr_storage place{};
  std::memcpy(&place, found->ai_addr, found->ai_addrlen);
  // The same offset in both families.
  reinterpret_cast<sockaddr_in*>(&place)->sin_port = htons(static_cast<uint16_t>(port));
  listener_ = OwnedSocket(socket(place.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  setsockopt(listener_.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener_.fd(), reinterpret_cast<sockaddr*>(&place), LengthOf(place)) != 0 ||
      listen(listener_.fd(), SOMAXCONN) != 0) {
    const std::string cure = port == 0 ? "" : " (DAD_PORT; another job may have it)";
    return SystemError("cannot listen on " + Printed(place) + cure, errno);
  }
  return Status::Ok();
}

std::shared_ptr<::gloo::transport::Device> Mesh::MakeDevice() {
  return std::make_shared<MeshDevice>(this);
}

std::vector<char> Mesh::OwnAddress() const {
  sockaddr_storage place{};
  socklen_t length = sizeof place;
  getsockname(listener_.fd(), reinterpret_cast<sockaddr*>(&place), &length);
  std::vector<char> bytes(kAddressBytes, '\0');
  std::memcpy(bytes.data(), &place, sizeof place);
  bytes.insert(bytes.end(), terms_.listener.begin(), terms_.listener.end());
  return bytes;
}

void Mesh::SetAddress(int peer, const std::vector<char>& address) {
  if (address.size() != kAddressBytes + kNameBytes) {
    throw ::gloo::IoException("rank " + std::to_string(peer) + " has left an address of " +
                              std::to_string(address.size()) +
                              " bytes in the store; is dad the same on all hosts?");
  }
  peers_[static_cast<size_t>(peer)].address.assign(address.begin(), address.end());
}

Result<std::vector<int>> Mesh::Connect(const std::function<Status()>& check) {
  auto check_at = Clock::now() + kBetweenChecks;
  while (!IsComplete()) {
    const auto now = Clock::now();
    if (now >= deadline_) return Missing();
    if (now >= check_at) {
      DAD_RETURN_IF_ERROR(check());
      check_at = Clock::now() + kBetweenChecks;
    }
    auto wake_at = std::min(deadline_, check_at);
    for (int peer = 0; peer < terms_.listening_rank; ++peer) {
      Peer& there = peers_[static_cast<size_t>(peer)];
      if (there.socket.fd() >= 0 || there.dialing) continue;
      if (there.dial_at <= now) {
        DAD_RETURN_IF_ERROR(Dial(peer));
      } else {
        wake_at = std::min(wake_at, there.dial_at);
      }
    }
    std::erase_if(attempts_, [&](Attempt& attempt) {
      if (attempt.give_up_at > now) return false;
      (void)Fail(attempt, Status::Timeout("it says nothing, or too slowly"), false);
      return true;
    });

    // Order below: the listener, connected ranks, attempts.
    std::vector<pollfd> waiting = {{listener_.fd(), POLLIN, 0}};
    std::vector<int> there;
    for (int peer = 0; peer < terms_.size; ++peer) {
      const int fd = peers_[static_cast<size_t>(peer)].socket.fd();
      if (fd < 0) continue;
      there.push_back(peer);
      waiting.push_back({fd, POLLRDHUP, 0});
    }
    for (const Attempt& attempt : attempts_) {
      wake_at = std::min(wake_at, attempt.give_up_at);
      const bool writes = attempt.connecting || !attempt.unsent.empty();
      waiting.push_back({attempt.socket.fd(), static_cast<short>(writes ? POLLOUT : POLLIN), 0});
    }
    const auto wait = std::chrono::ceil<milliseconds>(wake_at - now).count();
    if (poll(waiting.data(), waiting.size(), static_cast<int>(std::clamp<int64_t>(wait, 0, 1000))) <
        0) {
      if (errno == EINTR) continue;
      return SystemError("poll", errno);
    }

    for (size_t i = 0; i < there.size(); ++i) {
      DAD_RETURN_IF_ERROR(CheckConnected(there[i], waiting[1 + i].revents));
    }
    size_t next = 1 + there.size();
    for (auto attempt = attempts_.begin(); attempt != attempts_.end(); ++next) {
      Result<bool> goes_on = Advance(*attempt, waiting[next].revents);
      if (!goes_on.ok()) return goes_on.status();
      attempt = goes_on.value() ? std::next(attempt) : attempts_.erase(attempt);
    }
    if ((waiting[0].revents & POLLIN) != 0) DAD_RETURN_IF_ERROR(Accept());
  }
  std::vector<int> sockets(peers_.size(), -1);
  for (size_t peer = 0; peer < peers_.size(); ++peer) sockets[peer] = peers_[peer].socket.Release();
  return sockets;
}

// TLS belongs between a connection and its handshake, here and in Accept: a wrapped socket would
// take the place of OwnedSocket, and its channel binding would become one of the terms.
Status Mesh::Dial(int peer) {
  Peer& there = peers_[static_cast<size_t>(peer)];
  const sockaddr_storage to = DecodeAddress(there.address);
  OwnedSocket made(socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (made.fd() < 0) return SystemError("socket", errno);
  const bool at_once =
      connect(made.fd(), reinterpret_cast<const sockaddr*>(&to), LengthOf(to)) == 0;
  if (!at_once && errno != EINPROGRESS)
    return SystemError("cannot connect to " + Name(peer), errno);
  HandshakeTerms terms = terms_;
  terms.listening_rank = peer;
  terms.listener = there.address.substr(kAddressBytes);
  Handshake handshake =
      Handshake::OfConnecting(std::move(terms), terms_.listening_rank, RandomBytes(kNonceBytes));
  std::string hello = handshake.Begin();
  attempts_.push_back(
      {std::move(made), std::move(handshake), deadline_, peer, true, "", std::move(hello)});
  there.dialing = true;
  return Status::Ok();
}

Status Mesh::Accept() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    OwnedSocket came(accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (came.fd() < 0) {
      // The queue stays full, and poll() would return at once until the deadline. Strangers give
      // their descriptors back soon.
      const bool is_full = errno == EMFILE || errno == ENFILE;
      if (is_full && num_strangers_ == 0) return SystemError("accept (see: ulimit -n)", errno);
      return Status::Ok();
    }
    if (num_strangers_ >= kMostStrangers) {
      const auto oldest = std::ranges::find(attempts_, -1, &Attempt::peer);
      (void)Fail(*oldest, Status::Timeout("it says nothing, and others want its place"), false);
      attempts_.erase(oldest);
    }
    attempts_.push_back({std::move(came), Handshake::OfListening(terms_, RandomBytes(kNonceBytes)),
                         std::min(deadline_, Clock::now() + kHandshakeSeconds), -1, false, "", ""});
    ++num_strangers_;
  }
  return Status::Ok();
}

Result<bool> Mesh::Advance(Attempt& attempt, short events) {
  if (events == 0) return true;
  const int fd = attempt.socket.fd();
  if (attempt.connecting) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    // Its socket existed before its address did: a rank that refuses now has gone.
    if (error != 0) return Fail(attempt, SystemError("connect", error), error == ECONNREFUSED);
    attempt.connecting = false;
  }
  for (;;) {
    while (!attempt.unsent.empty()) {
      const ssize_t sent = send(fd, attempt.unsent.data(), attempt.unsent.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EAGAIN) return true;
      if (sent < 0 && errno != EINTR) return Fail(attempt, SystemError("send", errno), false);
      if (sent > 0) attempt.unsent.erase(0, static_cast<size_t>(sent));
    }
    if (attempt.handshake.done()) break;
    char chunk[128];
    const size_t wanted = attempt.handshake.needed() - attempt.received.size();
    // Not a byte more: later bytes belong to the frames.
    const ssize_t got = recv(fd, chunk, std::min(wanted, sizeof chunk), 0);
    if (got < 0 && errno == EAGAIN) return true;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Fail(attempt, SystemError("recv", errno), false);
    if (got == 0) return Fail(attempt, Status::Aborted("it hung up in the handshake"), false);
    attempt.received.append(chunk, static_cast<size_t>(got));
    if (attempt.received.size() < attempt.handshake.needed()) continue;
    Handshake::Step step = attempt.handshake.Take(attempt.received);
    attempt.received.clear();
    attempt.unsent = std::move(step.send);
    if (!step.status.ok()) {
      // The refusal of a stranger is sent at once or not at all.
      if (!attempt.unsent.empty()) {
        (void)send(fd, attempt.unsent.data(), attempt.unsent.size(), MSG_NOSIGNAL);
      }
      return Fail(attempt, step.status, true);
    }
  }
  Peer& there = peers_[static_cast<size_t>(attempt.handshake.peer())];
  if (attempt.peer < 0) --num_strangers_;
  there.dialing = false;
  // If it came twice, it has given the first one up.
  there.socket = std::move(attempt.socket);
  return false;
}

Result<bool> Mesh::Fail(Attempt& attempt, const Status& why, bool is_final) {
  if (attempt.peer < 0) {
    --num_strangers_;
    strangers_.Refuse(SourceOf(attempt.socket.fd()), why.message());
    return false;
  }
  Peer& there = peers_[static_cast<size_t>(attempt.peer)];
  there.dialing = false;
  there.dial_at = Clock::now() + kBetweenDials;
  there.last_error = why.message();
  if (is_final) {
    return Status(why.code(), "cannot connect to " + Name(attempt.peer) + ": " + why.message());
  }
  return false;
}

Status Mesh::CheckConnected(int peer, short events) {
  if ((events & (POLLRDHUP | POLLHUP | POLLERR)) == 0) return Status::Ok();
  return Status::Aborted("rank " + std::to_string(peer) +
                         " left while ranks connected to each other: its output says why");
}

bool Mesh::IsComplete() const {
  for (int peer = 0; peer < terms_.size; ++peer) {
    if (peer != terms_.listening_rank && peers_[static_cast<size_t>(peer)].socket.fd() < 0) {
      return false;
    }
  }
  return true;
}

Status Mesh::Missing() const {
  for (int peer = 0; peer < terms_.size; ++peer) {
    const Peer& there = peers_[static_cast<size_t>(peer)];
    if (peer == terms_.listening_rank || there.socket.fd() >= 0) continue;
    std::string why = there.last_error.empty() ? "" : ": " + there.last_error;
    if (strangers_.count() > 0) {
      why += "; " + std::to_string(strangers_.count()) + " connections of strangers were refused";
    }
    return Status::Timeout("no connection in time with " + Name(peer) + why);
  }
  return Status::Ok();
}

std::string Mesh::Name(int peer) const {
  return "rank " + std::to_string(peer) + " at " +
         Printed(DecodeAddress(peers_[static_cast<size_t>(peer)].address));
}

}  // namespace dad::tcp
