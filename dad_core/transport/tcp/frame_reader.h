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
    // Where the payload goes; null: into a buffer that comes with OnMessage. Other messages may
    // come before this one's is complete.
    virtual std::byte* OnHeader(const MessageHeader& header) = 0;
    virtual void OnMessage(const MessageHeader& header, AlignedBuffer payload) = 0;
  };

  FrameReader(Traffic* traffic, Listener* listener);

  // Reads what the socket has, up to a bound that lets other peers have their turn.
  // Not OK: nothing more can be read, and the reason.
  Status ReadSome(int fd);

  // Any thread.
  int64_t bytes_received() const { return bytes_received_; }

 private:
  struct Incoming {
    MessageHeader header;
    std::byte* at = nullptr;  // where the next byte of the payload is written
    size_t left = 0;          // bytes of the payload that are missing
    AlignedBuffer owned;
  };

  bool in_parts() const { return in_parts_.left > 0; }
  // The message to which the bytes of the current run belong.
  Incoming& current() { return in_parts() && !between_parts_ ? in_parts_ : whole_; }
  Status TakeStaged();
  Status StartMessage(const MessageHeader& header);
  Status StartPart(uint32_t num_bytes);
  void TakeRun(size_t num_bytes);
  void Complete(Incoming& message);
  // How much the stage may take behind the rest of the run.
  size_t StageBehindRun() const;

  Traffic* const traffic_;
  Listener* const listener_;
  std::atomic<int64_t> bytes_received_{0};

  Incoming in_parts_;           // a long message of which parts have arrived
  Incoming whole_;              // a message that comes in one piece, perhaps between two parts
  bool between_parts_ = false;  // whether it does
  size_t run_left_ = 0;         // bytes of a payload that follow without a break

  // Headers and small payloads pass through here, so a burst of small messages is one read; large
  // payloads do not.
  static constexpr size_t kStageBytes = 16 * 1024;
  std::unique_ptr<std::byte[]> stage_;
  size_t stage_begin_ = 0;
  size_t stage_end_ = 0;
};

}  // namespace dad::tcp
