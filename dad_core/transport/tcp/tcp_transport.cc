#include "transport/tcp/tcp_transport.h"

#include <gloo/rendezvous/context.h>

#include <exception>
#include <utility>

#include "rendezvous/store.h"
#include "transport/tcp/local_address.h"
#include "transport/tcp/mesh.h"
#include "transport/tcp/store_adaptor.h"

namespace dad::tcp {
namespace {

// The ports from DAD_PORT: the launcher's store has the first, the ranks of a host have those that
// follow.
int PortOf(const World& world, const Options& options) {
  return options.port == 0 ? 0 : static_cast<int>(options.port) + 1 + world.local_rank;
}

}  // namespace

Result<std::unique_ptr<Transport>> TcpTransport::Connect(const World& world,
                                                         const Options& options) {
  std::unique_ptr<TcpTransport> transport(new TcpTransport(world.rank, world.size));
  DAD_RETURN_IF_ERROR(transport->ConnectMesh(world, options));
  return std::unique_ptr<Transport>(std::move(transport));
}

TcpTransport::~TcpTransport() { Close(); }

Status TcpTransport::ConnectMesh(const World& world, const Options& options) {
  const auto timeout = std::chrono::duration_cast<Millis>(
      std::chrono::duration<double>(options.start_timeout_seconds));
  const auto deadline = Clock::now() + timeout;

  Result<std::unique_ptr<Store>> store =
      OpenStore(world.rendezvous, "dad_gloo_" + world.generation, world.store_key);
  if (!store.ok()) return store.status();
  StoreAdaptor adaptor(store.value().get(), rank(), size(), deadline);
  Result<std::string> address = LocalAddress(world, options.interface);
  if (!address.ok()) return address.status();

  HandshakeTerms terms;
  terms.secret = world.secret;
  terms.job = world.job;
  terms.generation = world.generation;
  terms.size = size();
  terms.listening_rank = rank();
  Mesh mesh(std::move(terms), deadline);
  DAD_RETURN_IF_ERROR(mesh.Listen(address.value(), PortOf(world, options)));
  try {
    std::shared_ptr<::gloo::transport::Device> device = mesh.MakeDevice();
    ::gloo::rendezvous::Context context(rank(), size());
    context.setTimeout(timeout);
    context.connectFullMesh(adaptor, device);
  } catch (const std::exception& error) {
    if (!adaptor.failure().ok()) return adaptor.failure();
    return Status::Unavailable("gloo at " + address.value() + ": " + error.what());
  }
  Result<std::vector<int>> sockets = mesh.Connect([&store] { return store.value()->CheckRound(); });
  if (!sockets.ok()) return sockets.status();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    connections_[peer] = std::make_unique<Connection>(
        sockets.value()[peer], peer, &loop_, static_cast<ConnectionListener*>(this), &traffic_);
  }
  for (const auto& connection : connections_) {
    if (connection != nullptr) connection->Start();
  }

  // That all our peers are connected does not mean that theirs are.
  const auto left = std::chrono::duration_cast<Millis>(deadline - Clock::now());
  if (Status met = Barrier(std::max(left, Millis(0))); !met.ok()) {
    return Status(met.code(), "while connecting: " + met.message());
  }
  adaptor.RemoveOwnKeys();
  return Status::Ok();
}

TransportCounters TcpTransport::counters() const {
  return {traffic_.bytes_sent, traffic_.bytes_received, traffic_.messages_sent};
}

// Only connections that have carried something count: in a ring that is one, which had the line to
// itself. Only those between hosts count, since the others use no line and are limited by the
// processor.
double TcpTransport::LineRate() const {
  double rate = 0;
  for (const auto& connection : connections_) {
    if (connection != nullptr && connection->leaves_host()) rate += connection->LineRate();
  }
  return rate;
}

int64_t TcpTransport::ProgressWith(int peer) const {
  const auto& connection = connections_[static_cast<size_t>(peer)];
  return connection == nullptr ? 0 : connection->Progress();
}

void TcpTransport::Send(int peer, MessageHeader header, GatherBuffer payload,
                        std::shared_ptr<void> keep) {
  connections_[peer]->writer().Send(header, std::move(payload), std::move(keep));
}

Status TcpTransport::Flush(Millis timeout) {
  const auto deadline = Clock::now() + timeout;
  for (int peer = 0; peer < size(); ++peer) {
    if (connections_[peer] != nullptr && !connections_[peer]->writer().WaitUntilTaken(deadline)) {
      return Status::Timeout("rank " + std::to_string(peer) +
                             " does not receive what is sent to it");
    }
  }
  return Status::Ok();
}

void TcpTransport::Close() {
  for (const auto& connection : connections_) {
    if (connection != nullptr) connection->Close();
  }
}

std::byte* TcpTransport::OnHeader(int peer, const MessageHeader& header) {
  return ReserveFor(peer, header);
}

void TcpTransport::OnMessage(int peer, const MessageHeader& header, AlignedBuffer payload) {
  DeliverMessage(peer, header, std::move(payload));
}

void TcpTransport::OnLost(int peer, Status why) { ReportLost(peer, std::move(why)); }

}  // namespace dad::tcp
