// Ranks joined by TCP connections (mesh.h). Send writes from the calling thread as long as the
// socket takes it; the loop's thread does the rest.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "dad/engine.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/event_loop.h"
#include "transport/tcp/traffic.h"
#include "transport/transport.h"

namespace dad::tcp {

class TcpTransport final : public Transport, private ConnectionListener {
 public:
  // Returns when all ranks are connected to each other, or options.start_timeout_seconds have
  // passed: the status says which are missing.
  static Result<std::unique_ptr<Transport>> Connect(const World& world, const Options& options);
  ~TcpTransport() override;

  std::string_view name() const override { return "gloo"; }
  TransportCounters counters() const override;
  double LineRate() const override;
  int64_t ProgressWith(int peer) const override;
  void Send(int peer, MessageHeader header, GatherBuffer payload,
            std::shared_ptr<void> keep) override;
  Status Flush(Millis timeout) override;
  void Close() override;

 private:
  TcpTransport(int rank, int size) : Transport(rank, size), connections_(size) {}

  Status ConnectMesh(const World& world, const Options& options);

  std::byte* OnHeader(int peer, const MessageHeader& header) override;
  void OnMessage(int peer, const MessageHeader& header, AlignedBuffer payload) override;
  void OnLost(int peer, Status why) override;

  Traffic traffic_;
  EventLoop loop_;
  std::vector<std::unique_ptr<Connection>> connections_;  // null at this rank
};

}  // namespace dad::tcp
