// The outgoing half of a connection: a queue of messages and a non-blocking
// socket. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dad/status.h"
#include "transport/tcp/traffic.h"
#include "util/gather_buffer.h"
#include "wire/message.h"

namespace dad::tcp {

class FrameWriter {
 public:
  // watch(fd, on): ask to be told, through OnWritable, when the socket takes bytes
  // again; or not any more. Called with the queue locked.
  using Watch = std::function<void(int fd, bool on)>;

  FrameWriter(Traffic* traffic, Watch watch) : traffic_(traffic), watch_(std::move(watch)) {}

  // From now on messages go to `fd`, which stays the caller's.
  void Open(int fd);
  // Drops what is queued; later messages are swallowed. `fd` is not used afterwards.
  void Close();

  // Writes in place as long as the socket takes it and queues the rest.
  void Send(const MessageHeader& header, GatherBuffer payload, std::shared_ptr<void> keep);
  void OnWritable();

  // Waits until the other host has acknowledged everything: then it arrives, even
  // if the connection is reset afterwards. False at the deadline.
  bool WaitUntilTaken(std::chrono::steady_clock::time_point deadline);

  // How many bytes the other host had acknowledged when this was last called while more were on
  // their way.
  int64_t BytesAcknowledged();

  // Why writing stopped, if it did; the connection is shut down then, so that the
  // reader meets its end.
  std::string error() const;

 private:
  struct Outgoing {
    Outgoing(const MessageHeader& header, GatherBuffer payload, std::shared_ptr<void> keep);

    MessageHeader header;
    GatherBuffer payload;
    std::vector<ByteSpan> pieces;  // into payload; what is left of it
    std::shared_ptr<void> keep;
    size_t header_left = sizeof(MessageHeader);
    size_t next_piece = 0;
  };
  using Done = std::vector<Outgoing>;  // has left, or will not; waits for its release

  // Without the lock: what a message keeps alive may do anything when it is released,
  // also send.
  void Release(Done done);
  void WriteLocked(Done* done);
  void AdvanceLocked(size_t num_bytes, Done* done);
  void FailLocked(int error, Done* done);

  Traffic* const traffic_;
  const Watch watch_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  int fd_ = -1;
  std::deque<Outgoing> queue_;
  int releasing_ = 0;  // threads that have written and not released yet
  std::string error_;
  int64_t bytes_sent_ = 0;
  int64_t bytes_acknowledged_ = 0;
};

}  // namespace dad::tcp
