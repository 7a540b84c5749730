// A pair of gloo that is there for its socket only: gloo finds the peer, listens and
// connects, then the socket is taken out.
#pragma once

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

namespace dad::tcp {

class SocketPair final : public ::gloo::transport::tcp::Pair {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  SocketPair(::gloo::transport::tcp::Context* context, ::gloo::transport::tcp::Device* device,
             int peer, std::chrono::milliseconds timeout, Deadline deadline);
  ~SocketPair() override;

  // The connected socket, for the caller to close; -1 if there is none any more.
  int TakeSocket();

  // Names the peer in what it throws.
  void connect(const std::vector<char>& address) override;

  // Unlike gloo's, does not reset the connection: somebody else has it by now.
  void close() override;

  // Never throws: gloo's thread would take the process down.
  void handleEvents(int events) override;

 private:
  // Called with gloo's m_ locked.
  void handleReadWrite(int events) override;
  void waitUntilConnected(std::unique_lock<std::mutex>& lock, bool use_timeout) override;

  const Deadline deadline_;
};

// Makes gloo make SocketPairs.
class SocketDevice final : public ::gloo::transport::tcp::Device {
 public:
  SocketDevice(const ::gloo::transport::tcp::attr& attr, SocketPair::Deadline deadline)
      : Device(attr), deadline_(deadline) {}
  std::shared_ptr<::gloo::transport::Context> createContext(int rank, int size) override;

 private:
  const SocketPair::Deadline deadline_;
};

}  // namespace dad::tcp
