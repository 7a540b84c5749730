// Restores the order of one peer's messages, which arrive on two paths: a small message that came
// over the control connection waits for the large one before it that MPI is still bringing.
// Thread-safe; hands out one at a time, to a receiver that may be called by any of the calling
// threads.
#pragma once

#include <deque>
#include <mutex>

#include "dad/status.h"
#include "util/aligned_buffer.h"
#include "wire/message.h"

namespace dad::mpi_transport {

class OrderedInbox {
 public:
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual void OnMessage(int peer, const MessageHeader& header, AlignedBuffer payload) = 0;
    virtual void OnEnd(int peer, const Status& why) = 0;
  };
  struct Entry {
    MessageHeader header;
    AlignedBuffer payload;
    bool complete = true;
    Status end;  // not OK: not a message, but the end of the peer
  };

  OrderedInbox(int peer, Receiver* receiver) : peer_(peer), receiver_(receiver) {}

  // A whole message has arrived.
  void Add(const MessageHeader& header, AlignedBuffer payload);

  // A message whose payload is in flight, into `payload` or into memory of the sink; Complete
  // reports its arrival. Null: the peer has ended.
  Entry* Expect(const MessageHeader& header, AlignedBuffer payload);
  void Complete(Entry* entry);

  // Nothing more comes over the control connection.
  void End(Status why);

  // The payloads in flight will not come. Their memory is never freed, because MPI may write into
  // it.
  void Forget();
  // The same, and the peer is lost: for the reason that End gave, or otherwise for this one.
  void Break(const Status& why);

  bool idle() const;
  bool ended() const;

 private:
  void ForgetLocked();
  void HandOut(std::unique_lock<std::mutex> lock);

  const int peer_;
  Receiver* const receiver_;

  mutable std::mutex mutex_;
  std::deque<Entry> queue_;  // entries stay where they are until handed out
  bool handing_out_ = false;
  Status end_;
};

}  // namespace dad::mpi_transport
