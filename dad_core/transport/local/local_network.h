// Ranks as threads of one process, connected by queues: the test double of a transport, and the
// real one of a world of size 1. Can delay, reorder, silence, kill and fail on demand, at run time,
// from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "transport/transport.h"

namespace dad {

namespace local {
class Hub;
}

class LocalNetwork {
 public:
  explicit LocalNetwork(int size);
  ~LocalNetwork();  // transports may outlive it

  // Each rank once.
  std::unique_ptr<Transport> Connect(int rank);

  // Every message sent from now on arrives this much later.
  void SetDelay(std::chrono::microseconds delay);

  // The line rate that the ranks are told; messages do not become slower by it.
  void SetLineRate(double bytes_per_second);

  // Adds up to `jitter` to the delay, drawn for each message from `seed`. Messages
  // of different peers overtake each other; those of one peer do not.
  void SetJitter(std::chrono::microseconds jitter, uint64_t seed);

  // Everything that the rank sends disappears, as if its cable were cut.
  void Silence(int rank);

  // Breaks all connections of the rank; both sides notice.
  void Kill(int rank);

  // The rank sends `messages` more; the attempt to send the next one kills it.
  void KillAfterSends(int rank, int64_t messages);

 private:
  std::shared_ptr<local::Hub> hub_;
};

}  // namespace dad
