// Memory that messages may be written into as they arrive. The worker offers it,
// the transport's thread takes it.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <tuple>

#include "util/mutex.h"
#include "wire/message.h"

namespace dad {

class ReceiveTable {
 public:
  void Offer(int peer, uint16_t lane, uint64_t batch, int round, std::span<std::byte> memory) {
    MutexLock lock(mutex_);
    offers_[{peer, lane, batch, round}] = memory;
  }

  // Null if nothing was offered for this message. An offer is used once.
  std::byte* Take(int peer, const MessageHeader& header) {
    if (header.kind != MessageKind::kData || header.round == 0) return nullptr;
    MutexLock lock(mutex_);
    auto found = offers_.find({peer, header.lane, header.batch, header.round});
    if (found == offers_.end() || found->second.size() != header.payload_bytes) return nullptr;
    std::byte* memory = found->second.data();
    offers_.erase(found);
    return memory;
  }

  // False: a message is being or has been written there; it is delivered in any case.
  bool TakeBack(int peer, uint16_t lane, uint64_t batch, int round) {
    MutexLock lock(mutex_);
    return offers_.erase({peer, lane, batch, round}) > 0;
  }

  void Clear() {
    MutexLock lock(mutex_);
    offers_.clear();
  }

 private:
  using Key = std::tuple<int, uint16_t, uint64_t, int>;
  Mutex mutex_;
  std::map<Key, std::span<std::byte>> offers_ GUARDED_BY(mutex_);
};

}  // namespace dad
