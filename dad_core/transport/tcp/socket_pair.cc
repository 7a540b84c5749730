#include "transport/tcp/socket_pair.h"

#include <fcntl.h>
#include <gloo/common/error.h>
#include <sys/epoll.h>

#include <exception>
#include <string>
#include <utility>

namespace dad::tcp {
namespace {

namespace tcp = ::gloo::transport::tcp;

class SocketContext final : public tcp::Context {
 public:
  SocketContext(std::shared_ptr<tcp::Device> device, int rank, int size,
                SocketPair::Deadline deadline)
      : Context(std::move(device), rank, size), deadline_(deadline) {}

  std::unique_ptr<::gloo::transport::Pair>& createPair(int rank) override {
    pairs_[rank] = std::make_unique<SocketPair>(this, device_.get(), rank, getTimeout(), deadline_);
    return pairs_[rank];
  }

 private:
  const SocketPair::Deadline deadline_;
};

}  // namespace

SocketPair::SocketPair(tcp::Context* context, tcp::Device* device, int peer,
                       std::chrono::milliseconds timeout, Deadline deadline)
    : Pair(context, device, peer, timeout), deadline_(deadline) {}

// Here and not in gloo's destructor: from there, close would not be ours.
SocketPair::~SocketPair() { close(); }

int SocketPair::TakeSocket() {
  std::lock_guard<std::mutex> lock(m_);
  if (state_ != CONNECTED) return -1;
  const int taken = fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  changeState(CLOSED);
  return taken;
}

void SocketPair::connect(const std::vector<char>& address) {
  try {
    Pair::connect(address);
  } catch (const ::gloo::Exception& error) {
    throw ::gloo::IoException("cannot connect to rank " + std::to_string(rank_) + ": " +
                              error.what());
  }
}

void SocketPair::close() {
  std::lock_guard<std::mutex> lock(m_);
  if (state_ != CLOSED) changeState(CLOSED);
}

void SocketPair::handleEvents(int events) {
  try {
    Pair::handleEvents(events);
  } catch (const std::exception& error) {
    // Thrown while connecting, say by a peer that was gone before we looked. gloo may
    // have left a socket that its loop does not know, and would die of taking it out.
    std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
    if (!lock || state_ == CLOSED || ex_ != nullptr) return;
    if (fd_ >= 0) device_->registerDescriptor(fd_, EPOLLIN, this);
    signalException(error.what());
  }
}

// A peer that is ahead of us sends already: its bytes wait in the socket.
void SocketPair::handleReadWrite(int) { device_->registerDescriptor(fd_, 0, this); }

void SocketPair::waitUntilConnected(std::unique_lock<std::mutex>& lock, bool) {
  const auto connected = [&] {
    throwIfException();
    return state_ >= CONNECTED;
  };
  if (!cv_.wait_until(lock, deadline_, connected)) {
    signalAndThrowException("no connection in time");
  }
}

std::shared_ptr<::gloo::transport::Context> SocketDevice::createContext(int rank, int size) {
  return std::make_shared<SocketContext>(shared_from_this(), rank, size, deadline_);
}

}  // namespace dad::tcp
