#include "transport/tcp/frame_writer.h"

#include <limits.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "rendezvous/backoff.h"

namespace dad::tcp {
namespace {

constexpr size_t kMaxPieces = 256;  // per call; well below IOV_MAX, and on the stack
static_assert(kMaxPieces <= IOV_MAX);

iovec Piece(const void* data, size_t num_bytes) { return {const_cast<void*>(data), num_bytes}; }

}  // namespace

FrameWriter::Outgoing::Outgoing(const MessageHeader& header_, GatherBuffer payload_,
                                std::shared_ptr<void> keep_)
    : header(header_), payload(std::move(payload_)), keep(std::move(keep_)) {
  header.payload_bytes = payload.size();
  pieces = payload.Pieces();
}

void FrameWriter::Open(int fd) {
  std::lock_guard<std::mutex> lock(mutex_);
  fd_ = fd;
}

void FrameWriter::Close() {
  Done dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fd_ = -1;
    dropped.assign(std::make_move_iterator(queue_.begin()), std::make_move_iterator(queue_.end()));
    queue_.clear();
    ++releasing_;
  }
  Release(std::move(dropped));
}

void FrameWriter::Send(const MessageHeader& header, GatherBuffer payload,
                       std::shared_ptr<void> keep) {
  Done done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fd_ < 0 || !error_.empty()) return;
    queue_.emplace_back(header, std::move(payload), std::move(keep));
    if (queue_.size() > 1) return;
    WriteLocked(&done);
    if (!queue_.empty()) watch_(fd_, true);
    ++releasing_;
  }
  Release(std::move(done));
}

void FrameWriter::OnWritable() {
  Done done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fd_ < 0) return;
    WriteLocked(&done);
    if (queue_.empty()) watch_(fd_, false);
    ++releasing_;
  }
  Release(std::move(done));
}

void FrameWriter::Release(Done done) {
  done.clear();
  bool idle = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    idle = --releasing_ == 0 && queue_.empty();
  }
  if (idle) idle_.notify_all();
}

bool FrameWriter::WaitUntilTaken(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto idle = [&] { return queue_.empty() && releasing_ == 0; };
  if (!idle_.wait_until(lock, deadline, idle)) return false;
  Backoff backoff(std::chrono::milliseconds(10), deadline);
  for (;;) {
    int unacknowledged = 0;
    if (fd_ < 0 || !error_.empty()) return true;  // nobody is left to take it
    if (ioctl(fd_, SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0) return true;
    lock.unlock();
    if (!backoff.Wait()) return false;
    lock.lock();
  }
}

int64_t FrameWriter::BytesAcknowledged() {
  std::lock_guard<std::mutex> lock(mutex_);
  int on_the_way = 0;
  if (fd_ >= 0 && ioctl(fd_, SIOCOUTQ, &on_the_way) == 0 && on_the_way > 0) {
    bytes_acknowledged_ = bytes_sent_ - on_the_way;
  }
  return bytes_acknowledged_;
}

std::string FrameWriter::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void FrameWriter::WriteLocked(Done* done) {
  while (!queue_.empty()) {
    std::array<iovec, kMaxPieces> pieces;
    size_t count = 0;
    size_t total = 0;
    const auto add = [&](iovec piece) {
      pieces[count++] = piece;
      total += piece.iov_len;
    };
    for (const Outgoing& message : queue_) {
      if (count == kMaxPieces) break;
      if (message.header_left > 0) {
        const auto* header = reinterpret_cast<const char*>(&message.header);
        add(Piece(header + sizeof(MessageHeader) - message.header_left, message.header_left));
      }
      for (size_t i = message.next_piece; i < message.pieces.size() && count < kMaxPieces; ++i) {
        add(Piece(message.pieces[i].data(), message.pieces[i].size()));
      }
    }
    msghdr call{};
    call.msg_iov = pieces.data();
    call.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_, &call, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) FailLocked(errno, done);
      return;
    }
    traffic_->bytes_sent += sent;
    bytes_sent_ += sent;
    AdvanceLocked(static_cast<size_t>(sent), done);
    if (static_cast<size_t>(sent) < total) return;  // the socket is full
  }
}

void FrameWriter::AdvanceLocked(size_t num_bytes, Done* done) {
  while (!queue_.empty()) {
    Outgoing& message = queue_.front();
    const size_t of_header = std::min(num_bytes, message.header_left);
    message.header_left -= of_header;
    num_bytes -= of_header;
    if (message.header_left > 0) return;
    while (message.next_piece < message.pieces.size()) {
      ByteSpan& piece = message.pieces[message.next_piece];
      const size_t of_piece = std::min(num_bytes, piece.size());
      piece = piece.subspan(of_piece);
      num_bytes -= of_piece;
      if (!piece.empty()) return;
      ++message.next_piece;
    }
    ++traffic_->messages_sent;
    done->push_back(std::move(message));
    queue_.pop_front();
  }
}

void FrameWriter::FailLocked(int error, Done* done) {
  error_ = std::strerror(error);
  done->insert(done->end(), std::make_move_iterator(queue_.begin()),
               std::make_move_iterator(queue_.end()));
  queue_.clear();
  shutdown(fd_, SHUT_RDWR);
}

}  // namespace dad::tcp
