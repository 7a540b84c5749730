// A connection to one peer. gloo makes the socket (listening, connecting, its
// epoll thread); the bytes on it are our own frames. gloo's unbound buffers would tell
// the peer of each message and wait for its answer before the data moves; a frame just
// goes.
#pragma once

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/gloo/frame_reader.h"
#include "transport/gloo/frame_writer.h"

namespace dad::gloo_transport {

// Takes what all pairs of a transport have to say; called by gloo's thread.
class PairListener {
 public:
  virtual ~PairListener() = default;
  virtual std::byte* OnHeader(int peer, const MessageHeader& header) = 0;
  virtual void OnMessage(int peer, const MessageHeader& header, AlignedBuffer payload) = 0;
  virtual void OnLost(int peer, Status why) = 0;
};

// What every pair of a transport shares; outlives them.
struct PairShared {
  PairListener* listener;
  Traffic* traffic;
  std::chrono::steady_clock::time_point connect_deadline;
};

class FramedPair final : public ::gloo::transport::tcp::Pair, private FrameReader::Listener {
 public:
  FramedPair(::gloo::transport::tcp::Context* context, ::gloo::transport::tcp::Device* device,
             int peer, std::chrono::milliseconds timeout, const PairShared& shared);
  ~FramedPair() override;

  FrameWriter& writer() { return writer_; }

  // Names the peer in what it throws.
  void connect(const std::vector<char>& address) override;

  // Unlike gloo's, does not reset the connection: what the kernel has still goes out.
  // Afterwards the listener is not called any more.
  void close() override;

  // Never throws: gloo's thread would take the process down.
  void handleEvents(int events) override;

 private:
  // These four are called with gloo's m_ locked.
  void handleReadWrite(int events) override;
  void changeState(state next) noexcept override;
  void waitUntilConnected(std::unique_lock<std::mutex>& lock, bool use_timeout) override;
  void Lose(const Status& why);

  std::byte* OnHeader(const MessageHeader& header) override;
  void OnMessage(const MessageHeader& header, AlignedBuffer payload) override;

  const PairShared shared_;
  FrameReader reader_;
  FrameWriter writer_;
};

// Makes gloo make FramedPairs.
class FramedDevice final : public ::gloo::transport::tcp::Device {
 public:
  FramedDevice(const ::gloo::transport::tcp::attr& attr, const PairShared& shared)
      : Device(attr), shared_(shared) {}
  std::shared_ptr<::gloo::transport::Context> createContext(int rank, int size) override;

 private:
  const PairShared shared_;
};

}  // namespace dad::gloo_transport
