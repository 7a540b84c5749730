// The outgoing half of a connection: a queue of messages and a non-blocking socket. Thread-safe.
//
// Control messages (wire/message.h) go before all others. Bytes that the kernel has taken cannot be
// overtaken, so the kernel is given no more than the line carries in a short time, and a long
// message is sent in parts, each of which takes a short time, too.
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
  // watch(fd, on): requests, or cancels, a call of OnWritable when the socket takes bytes again.
  // Called with the queue locked.
  using Watch = std::function<void(int fd, bool on)>;

  FrameWriter(Traffic* traffic, Watch watch) : traffic_(traffic), watch_(std::move(watch)) {}

  // From now on messages are sent to `fd`, which stays the caller's.
  void Open(int fd);
  // Drops the queue; later messages are swallowed. `fd` is not used afterwards.
  void Close();

  // Writes in place as long as the socket takes it and queues the rest. After kAbort nothing else
  // is sent: the queue is dropped, and the part that has begun is the last one.
  void Send(const MessageHeader& header, GatherBuffer payload, std::shared_ptr<void> keep);
  void OnWritable();

  // Waits until the other host has acknowledged everything; then it arrives even if the connection
  // is reset afterwards. False at the deadline.
  bool WaitUntilTaken(std::chrono::steady_clock::time_point deadline);

  // How many bytes the other host had acknowledged at the last call that found more in flight.
  int64_t BytesAcknowledged();

  // The reason why writing stopped, if it did; the connection is shut down then, so that the reader
  // meets its end.
  std::string error() const;

 private:
  struct Outgoing {
    Outgoing(const MessageHeader& header, GatherBuffer payload, std::shared_ptr<void> keep);

    bool in_parts() const { return header.payload_bytes > kLongestWhole; }

    MessageHeader header;
    GatherBuffer payload;
    std::vector<ByteSpan> pieces;  // into payload: the unsent rest
    std::shared_ptr<void> keep;
    size_t header_left = sizeof(MessageHeader);
    size_t next_piece = 0;
    size_t payload_left;
    // What is left of the current part: of the length in front of it, and of its bytes.
    uint32_t length = 0;
    size_t length_left = 0;
    size_t part_left = 0;
  };
  using Done = std::vector<Outgoing>;  // sent, or never will be; waiting to be released

  // The data that one call offers to the socket.
  class Offer;

  // Called without the lock: releasing what a message keeps alive may run any code, including a
  // send.
  void Release(Done done);
  bool EmptyLocked() const { return control_.empty() && bulk_.empty(); }
  void WriteLocked(Done* done);
  void FillLocked(Offer* offer);
  void FillWithBulkLocked(Offer* offer);
  void AdvanceLocked(const Offer& offer, size_t num_bytes, Done* done);
  void EndLocked(std::deque<Outgoing>* queue, Done* done);
  void DropBulkLocked(Done* done);
  void DropLocked(Done* done);
  void FitToLineLocked();
  void FailLocked(int error, Done* done);

  Traffic* const traffic_;
  const Watch watch_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  int fd_ = -1;
  std::deque<Outgoing> control_;
  std::deque<Outgoing> bulk_;
  // A message or part that has begun ends before anything else is sent: a control message, or a
  // part of bulk_'s first message (all of it, if it is not sent in parts).
  bool control_begun_ = false;
  bool bulk_begun_ = false;
  bool in_message_ = false;  // the peer expects another part
  bool aborting_ = false;
  int releasing_ = 0;  // threads that have written and not released yet
  std::string error_;
  int64_t bytes_sent_ = 0;
  int64_t bytes_acknowledged_ = 0;

  size_t part_bytes_ = 64 * 1024;
  size_t ahead_bytes_ = 0;  // bytes that the kernel takes ahead of the line
  std::chrono::steady_clock::time_point fit_at_;
};

}  // namespace dad::tcp
