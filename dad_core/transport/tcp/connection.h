// A connected socket to one peer, with our frames on it. gloo's unbound buffers would tell the peer
// of each message and wait for its answer before the data moves; a frame is just sent.
#pragma once

#include <atomic>

#include "transport/tcp/event_loop.h"
#include "transport/tcp/frame_reader.h"
#include "transport/tcp/frame_writer.h"
#include "transport/tcp/line_rate.h"

namespace dad::tcp {

// Receives the events of all connections of a transport; called by the loop's thread.
class ConnectionListener {
 public:
  virtual ~ConnectionListener() = default;
  virtual std::byte* OnHeader(int peer, const MessageHeader& header) = 0;
  virtual void OnMessage(int peer, const MessageHeader& header, AlignedBuffer payload) = 0;
  virtual void OnLost(int peer, Status why) = 0;
};

class Connection final : private EventLoop::Handler, private FrameReader::Listener {
 public:
  // Owns `fd` from here on. `loop`, `listener` and `traffic` outlive it.
  Connection(int fd, int peer, EventLoop* loop, ConnectionListener* listener, Traffic* traffic);
  ~Connection() override { Close(); }

  // Messages arrive from now on.
  void Start();
  FrameWriter& writer() { return writer_; }

  // See Transport::ProgressWith.
  int64_t Progress() { return reader_.bytes_received() + writer_.BytesAcknowledged(); }
  double LineRate() const { return open_ ? LineRateOf(fd_) : 0; }
  bool leaves_host() const { return open_ && LeavesHost(fd_); }

  // What the kernel still holds is sent. Afterwards the listener is not called any more.
  void Close();

 private:
  void OnEvents(uint32_t events) override;
  std::byte* OnHeader(const MessageHeader& header) override;
  void OnMessage(const MessageHeader& header, AlignedBuffer payload) override;
  bool Shut();  // false: another caller has done so
  void Lose(const Status& why);

  const int fd_;
  const int peer_;
  EventLoop* const loop_;
  ConnectionListener* const listener_;
  FrameReader reader_;
  FrameWriter writer_;
  std::atomic<bool> open_{true};
};

}  // namespace dad::tcp
