// A Transport joins a fixed set of ranks and moves messages between them. It
// knows no exchange and no engine. Backends are plug-ins (registry.h).
//
// Two faces:
//  - messages, for the engine: Send never blocks; what comes in is handed to a
//    sink by the transport's own thread. No receive has to be posted, so a message
//    takes one one-way delay.
//  - collectives, blocking and with a timeout: for start-up agreements, and for
//    transports with native ones. The defaults here are built from messages.
//
// Thread-safe. Messages from one peer arrive in the order they were sent.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dad/export.h"
#include "dad/request.h"
#include "dad/status.h"
#include "dad/tensor_view.h"
#include "util/aligned_buffer.h"
#include "util/gather_buffer.h"
#include "wire/message.h"

namespace dad {

// Receives what arrives. Called by the transport's thread, one call at a time per peer; must not
// block for long and must not call SetSink or Close.
class DAD_EXPORT MessageSink {
 public:
  virtual ~MessageSink() = default;

  // Called when the header of a message with a payload has arrived; returns where to put the
  // payload. Null: the transport uses a buffer of its own. The memory belongs to the transport
  // until Deliver, PeerLost or Close.
  virtual std::byte* Reserve(int peer, const MessageHeader& header) {
    (void)peer, (void)header;
    return nullptr;
  }

  // A whole message. `payload` is empty when it was written where Reserve said.
  virtual void Deliver(int peer, const MessageHeader& header, AlignedBuffer payload) = 0;

  // The connection is gone without a goodbye (a peer that sent kGoodbye leaves without this call).
  // Once per peer; nothing follows.
  virtual void PeerLost(int peer, const Status& why) = 0;
};

struct TransportCounters {
  int64_t bytes_sent = 0;  // as handed to the kernel, headers included
  int64_t bytes_received = 0;
  int64_t messages_sent = 0;
};

class DeviceCollectives;

class DAD_EXPORT Transport {
 public:
  using Millis = std::chrono::milliseconds;
  using Clock = std::chrono::steady_clock;

  Transport(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual std::string_view name() const = 0;
  virtual TransportCounters counters() const = 0;

  // Bytes per second to all peers together while the line was the limit; 0: not known.
  virtual double LineRate() const { return 0; }

  // Grows while bytes move between this rank and `peer`: those received, part of a message or not,
  // and those that its host has acknowledged while more of ours were on their way. The latter
  // condition matters: the kernel of a stopped process still acknowledges a lone ping. Any thread.
  // A transport whose messages cannot be slow need not count.
  virtual int64_t ProgressWith(int peer) const {
    (void)peer;
    return 0;
  }

  // Null: this transport moves host memory only.
  virtual DeviceCollectives* device_collectives() { return nullptr; }

  // What arrived before the sink was set is handed to it first, by this thread. Null detaches:
  // after the call returns the old sink is not called any more.
  void SetSink(MessageSink* sink);

  // Queues a message; `keep` is released when its last byte has left this
  // process, or when the peer is lost. header.payload_bytes is filled in here.
  // Never blocks; a lost peer swallows it (the sink has been told).
  virtual void Send(int peer, MessageHeader header, GatherBuffer payload,
                    std::shared_ptr<void> keep) = 0;

  // Waits until everything queued has left; kTimeout if it does not.
  virtual Status Flush(Millis timeout) = 0;

  // Ends all connections; queued messages are dropped, later ones swallowed.
  // Afterwards neither sink nor reserved memory is touched. Idempotent. Waits for
  // a sink call that is under way: hold no lock that the sink takes.
  virtual void Close() = 0;

  // ---- Collectives: every rank calls the same ones in the same order. ----
  // On failure the status names the peer; the transport is then good for Close only.
  virtual Status AllReduce(const TensorView& inout, ReduceOp op, Millis timeout);
  // counts: bytes from each rank; out holds them one after the other.
  virtual Status AllGatherV(ByteSpan mine, std::span<const size_t> counts, std::span<std::byte> out,
                            Millis timeout);
  virtual Status Broadcast(std::span<std::byte> inout, int root, Millis timeout);
  // `in` is size() blocks, counts in elements; the sum of this rank's block goes to out.
  virtual Status ReduceScatter(const TensorView& in, std::span<const int64_t> counts,
                               const TensorView& out, ReduceOp op, Millis timeout);
  virtual Status AllToAllV(ByteSpan in, std::span<const size_t> send_counts,
                           std::span<std::byte> out, std::span<const size_t> receive_counts,
                           Millis timeout);
  virtual Status SendTo(int peer, uint64_t tag, ByteSpan bytes, Millis timeout);
  virtual Status ReceiveFrom(int peer, uint64_t tag, std::span<std::byte> bytes, Millis timeout);
  virtual Status Barrier(Millis timeout);

  // Gathers one blob of any length from every rank.
  virtual Result<std::vector<std::vector<std::byte>>> AllGatherBlobs(ByteSpan mine, Millis timeout);

 protected:
  // For backends: passes on what arrived. Collective messages go to the mailbox, the rest to the
  // sink (or wait for one).
  std::byte* ReserveFor(int peer, const MessageHeader& header);
  void DeliverMessage(int peer, const MessageHeader& header, AlignedBuffer payload);
  void ReportLost(int peer, Status why);

 private:
  // Building blocks of the default collectives (collectives.cc).
  uint64_t NextTag();
  void Post(int peer, uint64_t tag, ByteSpan bytes, std::shared_ptr<void> keep);
  Result<AlignedBuffer> Take(int peer, uint64_t tag, Clock::time_point deadline, const char* what);
  Result<AlignedBuffer> TakeExactly(int peer, uint64_t tag, size_t num_bytes,
                                    Clock::time_point deadline, const char* what);

  // Sends blocks[r] to rank r and adds up, into `out`, what the other ranks send here.
  Status ReduceBlocks(std::span<const ByteSpan> blocks, std::shared_ptr<void> keep,
                      const TensorView& out, ReduceOp op, Millis timeout, const char* what);

  const int rank_;
  const int size_;

  std::mutex sink_mutex_;  // held while the sink is called
  MessageSink* sink_ = nullptr;
  struct Early {
    int peer;
    MessageHeader header;
    AlignedBuffer payload;
    Status lost;  // not OK: not a message, but the end of that peer
  };
  std::deque<Early> early_;  // kept until there is a sink
  std::set<int> ended_;      // peers that said goodbye or are lost

  std::mutex mailbox_mutex_;
  std::condition_variable mailbox_changed_;
  std::map<std::pair<int, uint64_t>, std::deque<AlignedBuffer>> mailbox_;
  std::map<int, Status> lost_;
  uint64_t next_tag_ = 0;  // next tag of built-in collectives
};

}  // namespace dad
