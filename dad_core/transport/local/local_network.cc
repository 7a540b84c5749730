#include "transport/local/local_network.h"

#include "transport/local/hub.h"
#include "transport/local/local_transport.h"

namespace dad {

LocalNetwork::LocalNetwork(int size) : hub_(std::make_shared<local::Hub>(size)) {}
LocalNetwork::~LocalNetwork() = default;

std::unique_ptr<Transport> LocalNetwork::Connect(int rank) {
  return std::make_unique<local::LocalTransport>(rank, hub_);
}

void LocalNetwork::SetDelay(std::chrono::microseconds delay) { hub_->SetDelay(delay); }

void LocalNetwork::SetLineRate(double bytes_per_second) { hub_->SetLineRate(bytes_per_second); }

void LocalNetwork::SetJitter(std::chrono::microseconds jitter, uint64_t seed) {
  hub_->SetJitter(jitter, seed);
}

void LocalNetwork::Silence(int rank) { hub_->Silence(rank); }

void LocalNetwork::Kill(int rank) { hub_->Kill(rank); }

void LocalNetwork::KillAfterSends(int rank, int64_t messages) {
  hub_->KillAfterSends(rank, messages);
}

}  // namespace dad
