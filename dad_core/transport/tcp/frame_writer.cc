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
#include <span>
#include <utility>

#include "rendezvous/backoff.h"
#include "transport/tcp/line_rate.h"

namespace dad::tcp {
namespace {

constexpr size_t kMaxPieces = 256;  // per call; well below IOV_MAX, and on the stack
static_assert(kMaxPieces <= IOV_MAX);

// How long a control message may wait for the bytes that the kernel holds ahead of the line, and
// for the part that has begun. The first must cover the time until this process gets the processor
// again.
constexpr double kAheadSeconds = 0.05;
constexpr double kPartSeconds = 0.025;
constexpr size_t kLeastBytes = 8 * 1024;
constexpr size_t kMostAhead = 4 << 20;
constexpr size_t kMostPart = 1 << 20;
constexpr size_t kFirstAhead = 128 * 1024;  // used until the rate is known
constexpr std::chrono::milliseconds kBetweenFits{50};

}  // namespace

FrameWriter::Outgoing::Outgoing(const MessageHeader& header_, GatherBuffer payload_,
                                std::shared_ptr<void> keep_)
    : header(header_), payload(std::move(payload_)), keep(std::move(keep_)) {
  header.payload_bytes = payload_left = payload.size();
  pieces = payload.Pieces();
}

class FrameWriter::Offer {
 public:
  enum class What { kLength, kHeader, kPayload };
  struct Step {
    Outgoing* message;
    What what;
    size_t num_bytes;
    uint32_t length;  // kLength: of the part that begins; 0: a control message follows
  };

  bool has_room() const { return count_ < kMaxPieces; }
  std::span<const Step> steps() const { return {steps_.data(), count_}; }
  std::span<iovec> pieces() { return {pieces_.data(), count_}; }
  size_t total() const { return total_; }

  void AddLength(Outgoing& message, uint32_t length) {
    if (!has_room()) return;
    lengths_[count_] = length;
    Add(message, What::kLength, &lengths_[count_], sizeof length, length);
  }
  // The unsent rest of the length of the part that has begun.
  void AddRestOfLength(Outgoing& message) {
    const auto* end = reinterpret_cast<const char*>(&message.length) + sizeof message.length;
    Add(message, What::kLength, end - message.length_left, message.length_left, message.length);
  }
  void AddHeader(Outgoing& message) {
    const auto* end = reinterpret_cast<const char*>(&message.header) + sizeof message.header;
    Add(message, What::kHeader, end - message.header_left, message.header_left, 0);
  }
  // `skip` bytes of the rest have been added already.
  void AddPayload(Outgoing& message, size_t skip, size_t num_bytes) {
    for (size_t i = message.next_piece; i < message.pieces.size() && num_bytes > 0; ++i) {
      ByteSpan piece = message.pieces[i];
      const size_t skipped = std::min(skip, piece.size());
      skip -= skipped;
      piece = piece.subspan(skipped);
      piece = piece.first(std::min(piece.size(), num_bytes));
      num_bytes -= piece.size();
      Add(message, What::kPayload, piece.data(), piece.size(), 0);
    }
  }

 private:
  void Add(Outgoing& message, What what, const void* data, size_t num_bytes, uint32_t length) {
    if (num_bytes == 0 || !has_room()) return;
    pieces_[count_] = {const_cast<void*>(data), num_bytes};
    steps_[count_] = {&message, what, num_bytes, length};
    ++count_;
    total_ += num_bytes;
  }

  std::array<iovec, kMaxPieces> pieces_;
  std::array<Step, kMaxPieces> steps_;
  std::array<uint32_t, kMaxPieces> lengths_;
  size_t count_ = 0;
  size_t total_ = 0;
};

void FrameWriter::Open(int fd) {
  std::lock_guard<std::mutex> lock(mutex_);
  fd_ = fd;
  LimitUnsent(fd_, ahead_bytes_ = kFirstAhead);
}

void FrameWriter::Close() {
  Done dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fd_ = -1;
    DropLocked(&dropped);
    ++releasing_;
  }
  Release(std::move(dropped));
}

void FrameWriter::Send(const MessageHeader& header, GatherBuffer payload,
                       std::shared_ptr<void> keep) {
  Done done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fd_ < 0 || !error_.empty() || aborting_) return;
    const bool blocked = !EmptyLocked();
    Outgoing message(header, std::move(payload), std::move(keep));
    if (KindOf(header) == MessageKind::kAbort) {
      aborting_ = true;
      DropBulkLocked(&done);
    }
    (IsControl(message.header) ? control_ : bulk_).push_back(std::move(message));
    // The loop's thread will write as soon as the socket takes more.
    if (!blocked) {
      WriteLocked(&done);
      if (!EmptyLocked()) watch_(fd_, true);
    }
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
    if (EmptyLocked()) watch_(fd_, false);
    ++releasing_;
  }
  Release(std::move(done));
}

void FrameWriter::Release(Done done) {
  done.clear();
  bool idle = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    idle = --releasing_ == 0 && EmptyLocked();
  }
  if (idle) idle_.notify_all();
}

bool FrameWriter::WaitUntilTaken(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto idle = [&] { return EmptyLocked() && releasing_ == 0; };
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
  while (!EmptyLocked()) {
    if (!bulk_.empty()) FitToLineLocked();
    Offer offer;
    FillLocked(&offer);
    msghdr call{};
    call.msg_iov = offer.pieces().data();
    call.msg_iovlen = offer.pieces().size();
    const ssize_t sent = sendmsg(fd_, &call, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) FailLocked(errno, done);
      return;
    }
    traffic_->bytes_sent += sent;
    bytes_sent_ += sent;
    AdvanceLocked(offer, static_cast<size_t>(sent), done);
    if (static_cast<size_t>(sent) < offer.total()) return;  // the socket is full
  }
}

void FrameWriter::FillLocked(Offer* offer) {
  bool in_message = in_message_;
  if (control_begun_) {
    Outgoing& message = control_.front();
    offer->AddRestOfLength(message);
    offer->AddHeader(message);
    offer->AddPayload(message, 0, message.payload_left);
  } else if (bulk_begun_) {
    Outgoing& message = bulk_.front();
    const size_t rest = message.in_parts() ? message.part_left : message.payload_left;
    offer->AddHeader(message);
    offer->AddRestOfLength(message);
    offer->AddPayload(message, 0, rest);
    in_message = message.in_parts() && message.payload_left > rest;
  }
  for (size_t i = control_begun_ ? 1 : 0; i < control_.size(); ++i) {
    Outgoing& message = control_[i];
    if (in_message) offer->AddLength(message, 0);
    offer->AddHeader(message);
    offer->AddPayload(message, 0, message.payload_left);
  }
  if (!aborting_) FillWithBulkLocked(offer);
}

void FrameWriter::FillWithBulkLocked(Offer* offer) {
  for (size_t i = 0; i < bulk_.size() && offer->has_room(); ++i) {
    Outgoing& message = bulk_[i];
    const bool begun = i == 0 && bulk_begun_;
    size_t added = 0;
    if (begun) {
      added = message.in_parts() ? message.part_left : message.payload_left;
    } else {
      offer->AddHeader(message);
    }
    while (added < message.payload_left && offer->has_room()) {
      size_t num_bytes = message.payload_left - added;
      if (message.in_parts()) {
        num_bytes = std::min(num_bytes, part_bytes_);
        offer->AddLength(message, static_cast<uint32_t>(num_bytes));
      }
      offer->AddPayload(message, added, num_bytes);
      added += num_bytes;
    }
  }
}

void FrameWriter::AdvanceLocked(const Offer& offer, size_t num_bytes, Done* done) {
  for (const Offer::Step& step : offer.steps()) {
    const size_t taken = std::min(num_bytes, step.num_bytes);
    if (taken == 0) return;
    num_bytes -= taken;
    Outgoing& message = *step.message;
    const bool is_control = IsControl(message.header);
    (is_control ? control_begun_ : bulk_begun_) = true;
    switch (step.what) {
      case Offer::What::kLength:
        if (message.length_left == 0) {
          message.length = step.length;
          message.length_left = sizeof message.length;
          message.part_left = step.length;
        }
        message.length_left -= taken;
        break;
      case Offer::What::kHeader:
        message.header_left -= taken;
        if (message.header_left == 0 && message.in_parts()) {
          in_message_ = true;
          bulk_begun_ = false;  // control messages may come before its first part
        }
        break;
      case Offer::What::kPayload: {
        ByteSpan& piece = message.pieces[message.next_piece];
        piece = piece.subspan(taken);
        if (piece.empty()) ++message.next_piece;
        message.payload_left -= taken;
        if (!message.in_parts()) break;
        message.part_left -= taken;
        if (message.part_left == 0) bulk_begun_ = false;
        if (message.payload_left == 0) in_message_ = false;
        break;
      }
    }
    if (message.header_left == 0 && message.payload_left == 0) {
      EndLocked(is_control ? &control_ : &bulk_, done);
    } else if (aborting_ && !bulk_begun_) {
      DropBulkLocked(done);  // the message whose part has just ended
    }
  }
}

void FrameWriter::EndLocked(std::deque<Outgoing>* queue, Done* done) {
  (queue == &control_ ? control_begun_ : bulk_begun_) = false;
  ++traffic_->messages_sent;
  done->push_back(std::move(queue->front()));
  queue->pop_front();
}

// Not the part that has begun.
void FrameWriter::DropBulkLocked(Done* done) {
  while (!bulk_.empty() && !(bulk_.size() == 1 && bulk_begun_)) {
    done->push_back(std::move(bulk_.back()));
    bulk_.pop_back();
  }
}

void FrameWriter::DropLocked(Done* done) {
  for (std::deque<Outgoing>* queue : {&control_, &bulk_}) {
    done->insert(done->end(), std::make_move_iterator(queue->begin()),
                 std::make_move_iterator(queue->end()));
    queue->clear();
  }
  control_begun_ = bulk_begun_ = false;
}

void FrameWriter::FitToLineLocked() {
  const auto now = std::chrono::steady_clock::now();
  if (now < fit_at_) return;
  fit_at_ = now + kBetweenFits;
  const double rate = RecentRateOf(fd_);
  if (rate <= 0) return;
  const auto bytes_in = [rate](double seconds, size_t most) {
    const double bytes = std::min(rate * seconds, static_cast<double>(most));
    return std::max(static_cast<size_t>(bytes), kLeastBytes);
  };
  part_bytes_ = bytes_in(kPartSeconds, kMostPart);
  const size_t ahead = bytes_in(kAheadSeconds, kMostAhead);
  // Not for every small change of the line.
  if (ahead < ahead_bytes_ / 2 || ahead > ahead_bytes_ + ahead_bytes_ / 2) {
    LimitUnsent(fd_, ahead_bytes_ = ahead);
  }
}

void FrameWriter::FailLocked(int error, Done* done) {
  error_ = std::strerror(error);
  DropLocked(done);
  shutdown(fd_, SHUT_RDWR);
}

}  // namespace dad::tcp
