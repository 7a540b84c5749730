// Connects this rank to all others. gloo's rendezvous hands out the addresses; the sockets are
// ours. Every rank has one port, on the interface that the ranks use, as long as they connect. The
// rank with the higher number connects, and both prove that they belong to this job
// (wire/handshake.h). Other connections are refused, counted and logged, and delay nobody.
#pragma once

#include <gloo/transport/device.h>

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "dad/status.h"
#include "transport/tcp/strangers.h"
#include "wire/handshake.h"

namespace dad::tcp {

// A socket that is closed with this object.
class OwnedSocket {
 public:
  explicit OwnedSocket(int fd = -1) : fd_(fd) {}
  ~OwnedSocket();
  OwnedSocket(OwnedSocket&& other) noexcept : fd_(other.Release()) {}
  OwnedSocket& operator=(OwnedSocket&& other) noexcept;
  int fd() const { return fd_; }
  int Release();

 private:
  int fd_;
};

class Mesh {
 public:
  using Clock = std::chrono::steady_clock;

  // What all connections of this rank have in common; listening_rank and listener are ours.
  Mesh(HandshakeTerms terms, Clock::time_point deadline);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Listens on a numeric address. Port 0: any free one.
  Status Listen(const std::string& address, int port);

  // Gives gloo's rendezvous our address and takes those of the others. Must not outlive this
  // object.
  std::shared_ptr<::gloo::transport::Device> MakeDevice();

  // Call when all addresses are known. Returns connected sockets by rank, -1 for this rank, which
  // the caller closes; or an error that names the rank that did not come, and why. `check` is
  // called now and then to see whether there is still something to wait for: a rank that has died
  // never comes.
  Result<std::vector<int>> Connect(const std::function<Status()>& check);

  // Of fixed length, as gloo wants it.
  std::vector<char> OwnAddress() const;
  void SetAddress(int peer, const std::vector<char>& address);

 private:
  // A connection attempt.
  struct Attempt {
    OwnedSocket socket;
    Handshake handshake;
    Clock::time_point give_up_at;
    int peer = -1;  // -1: a connection that others opened
    bool connecting = false;
    std::string received;
    std::string unsent;
  };
  struct Peer {
    std::string address;  // as received by SetAddress
    OwnedSocket socket;   // set when both sides have accepted it
    Clock::time_point dial_at{};
    bool dialing = false;
    std::string last_error;
  };

  Status Dial(int peer);
  Status Accept();
  // Advances an attempt. False: it is over, and was recorded.
  Result<bool> Advance(Attempt& attempt, short events);
  Result<bool> Fail(Attempt& attempt, const Status& why, bool is_final);
  Status CheckConnected(int peer, short events);
  bool IsComplete() const;
  Status Missing() const;
  std::string Name(int peer) const;

  const HandshakeTerms terms_;
  const Clock::time_point deadline_;
  OwnedSocket listener_;
  std::vector<Peer> peers_;
  std::list<Attempt> attempts_;  // the oldest first
  size_t num_strangers_ = 0;     // attempts that others opened, and that have proven nothing yet
  Strangers strangers_;
};

}  // namespace dad::tcp
