// The incoming half of a connection: cuts a byte stream into messages. Used by one
// thread, except where a method says otherwise.
#pragma once

#include <atomic>
#include <memory>

#include "dad/status.h"
#include "transport/tcp/traffic.h"
#include "util/aligned_buffer.h"
#include "wire/message.h"

namespace dad::tcp {

class FrameReader {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    // Where the payload shall go; null: into a buffer that comes with OnMessage.
    virtual std::byte* OnHeader(const MessageHeader& header) = 0;
    virtual void OnMessage(const MessageHeader& header, AlignedBuffer payload) = 0;
  };

  FrameReader(Traffic* traffic, Listener* listener);

  // Reads what the socket has, up to a bound that lets other peers have their turn.
  // Not OK: nothing more can be read, and why.
  Status ReadSome(int fd);

  // Any thread.
  int64_t bytes_received() const { return bytes_received_; }

 private:
  bool in_payload() const { return payload_left_ > 0; }
  Status TakeStaged();
  Status StartMessage();
  void TakePayload(size_t num_bytes);

  Traffic* const traffic_;
  Listener* const listener_;
  std::atomic<int64_t> bytes_received_{0};

  MessageHeader header_;
  std::byte* payload_at_ = nullptr;
  size_t payload_left_ = 0;
  AlignedBuffer owned_;

  // Headers and small payloads pass through here, so that a burst of small messages
  // is one read; large payloads do not.
  static constexpr size_t kStageBytes = 16 * 1024;
  std::unique_ptr<std::byte[]> stage_;
  size_t stage_begin_ = 0;
  size_t stage_end_ = 0;
};

}  // namespace dad::tcp
