#include "transport/gloo/framed_pair.h"

#include <gloo/common/error.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <exception>
#include <utility>

namespace dad::gloo_transport {
namespace {

namespace tcp = ::gloo::transport::tcp;

class FramedContext final : public tcp::Context {
 public:
  FramedContext(std::shared_ptr<tcp::Device> device, int rank, int size, const PairShared& shared)
      : Context(std::move(device), rank, size), shared_(shared) {}

  std::unique_ptr<::gloo::transport::Pair>& createPair(int rank) override {
    pairs_[rank] = std::make_unique<FramedPair>(this, device_.get(), rank, getTimeout(), shared_);
    return pairs_[rank];
  }

 private:
  const PairShared shared_;
};

}  // namespace

FramedPair::FramedPair(tcp::Context* context, tcp::Device* device, int peer,
                       std::chrono::milliseconds timeout, const PairShared& shared)
    : Pair(context, device, peer, timeout),
      shared_(shared),
      reader_(shared.traffic, this),
      writer_(shared.traffic, [this](int fd, bool on) {
        device_->registerDescriptor(fd, on ? EPOLLIN | EPOLLOUT : EPOLLIN, this);
      }) {}

// Here and not in gloo's destructor: from there, changeState would not be ours.
FramedPair::~FramedPair() { close(); }

void FramedPair::connect(const std::vector<char>& address) {
  try {
    Pair::connect(address);
  } catch (const ::gloo::Exception& error) {
    throw ::gloo::IoException("cannot connect to rank " + std::to_string(rank_) + ": " +
                              error.what());
  }
}

void FramedPair::close() {
  std::lock_guard<std::mutex> lock(m_);
  if (state_ != CLOSED) changeState(CLOSED);
}

void FramedPair::handleEvents(int events) {
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

void FramedPair::handleReadWrite(int events) {
  try {
    if ((events & EPOLLOUT) != 0) writer_.OnWritable();
    if ((events & ~EPOLLOUT) == 0) return;
    if (Status read = reader_.ReadSome(fd_); !read.ok()) Lose(read);
  } catch (const std::exception& error) {  // out of memory, say
    Lose(Status::Aborted(error.what()));
  }
}

void FramedPair::Lose(const Status& why) {
  const std::string write_error = writer_.error();
  const std::string& reason = write_error.empty() ? why.message() : write_error;
  changeState(CLOSED);
  shared_.listener->OnLost(rank_, Status::Aborted("rank " + std::to_string(rank_) + ": " + reason));
}

void FramedPair::changeState(state next) noexcept {
  if (next == CONNECTED) writer_.Open(fd_);
  if (next == CLOSED) writer_.Close();
  Pair::changeState(next);
}

void FramedPair::waitUntilConnected(std::unique_lock<std::mutex>& lock, bool) {
  const auto connected = [&] {
    throwIfException();
    return state_ >= CONNECTED;
  };
  if (!cv_.wait_until(lock, shared_.connect_deadline, connected)) {
    signalAndThrowException("no connection in time");
  }
}

std::byte* FramedPair::OnHeader(const MessageHeader& header) {
  return shared_.listener->OnHeader(rank_, header);
}

void FramedPair::OnMessage(const MessageHeader& header, AlignedBuffer payload) {
  shared_.listener->OnMessage(rank_, header, std::move(payload));
}

std::shared_ptr<::gloo::transport::Context> FramedDevice::createContext(int rank, int size) {
  return std::make_shared<FramedContext>(shared_from_this(), rank, size, shared_);
}

}  // namespace dad::gloo_transport
