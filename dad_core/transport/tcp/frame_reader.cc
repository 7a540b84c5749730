#include "transport/tcp/frame_reader.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace dad::tcp {
namespace {

constexpr size_t kBytesPerTurn = 4 << 20;
// Longer frames are not ours, whatever the header says.
constexpr uint64_t kLongestPayload = uint64_t{1} << 38;

}  // namespace

FrameReader::FrameReader(Traffic* traffic, Listener* listener)
    : traffic_(traffic), listener_(listener), stage_(new std::byte[kStageBytes]) {}

Status FrameReader::ReadSome(int fd) {
  for (size_t read = 0; read < kBytesPerTurn;) {
    // TakeStaged leaves less than a header, at the front of the stage.
    iovec places[2] = {{current().at, std::min(run_left_, kBytesPerTurn)},
                       {stage_.get() + stage_end_, kStageBytes - stage_end_}};
    // The stage may follow the run only if the run is read to its end.
    const bool in_run = run_left_ > 0;
    const bool with_stage = places[0].iov_len == run_left_;
    if (in_run) places[1].iov_len = StageBehindRun();
    msghdr call{};
    call.msg_iov = in_run ? places : places + 1;
    call.msg_iovlen = in_run && with_stage ? 2 : 1;
    const size_t asked =
        in_run ? places[0].iov_len + (with_stage ? places[1].iov_len : 0) : places[1].iov_len;

    const ssize_t got = recvmsg(fd, &call, MSG_DONTWAIT);
    if (got == 0) return Status::Aborted("closed the connection");
    if (got < 0) {
      if (errno == EAGAIN) return Status::Ok();
      if (errno == EINTR) continue;
      return Status::Aborted(std::strerror(errno));
    }
    traffic_->bytes_received += got;
    bytes_received_ += got;
    read += static_cast<size_t>(got);
    const size_t of_run = std::min(static_cast<size_t>(got), run_left_);
    stage_end_ += static_cast<size_t>(got) - of_run;
    if (of_run > 0) TakeRun(of_run);
    DAD_RETURN_IF_ERROR(TakeStaged());
    if (static_cast<size_t>(got) < asked) return Status::Ok();  // the socket is empty
  }
  return Status::Ok();
}

// Between two parts there is a length; what follows it has a place of its own, so it need not be
// copied there.
size_t FrameReader::StageBehindRun() const {
  const bool more_parts = !between_parts_ && in_parts_.left > run_left_;
  return more_parts ? sizeof(uint32_t) : kStageBytes;
}

Status FrameReader::TakeStaged() {
  while (stage_begin_ < stage_end_) {
    const size_t staged = stage_end_ - stage_begin_;
    const std::byte* front = stage_.get() + stage_begin_;
    if (run_left_ > 0) {
      const size_t num_bytes = std::min(staged, run_left_);
      std::memcpy(current().at, front, num_bytes);
      stage_begin_ += num_bytes;
      TakeRun(num_bytes);
    } else if (in_parts() && !between_parts_) {
      uint32_t length = 0;
      if (staged < sizeof length) break;
      std::memcpy(&length, front, sizeof length);
      stage_begin_ += sizeof length;
      DAD_RETURN_IF_ERROR(StartPart(length));
    } else {
      MessageHeader header;
      if (staged < sizeof header) break;
      std::memcpy(&header, front, sizeof header);
      stage_begin_ += sizeof header;
      DAD_RETURN_IF_ERROR(StartMessage(header));
    }
  }
  std::memmove(stage_.get(), stage_.get() + stage_begin_, stage_end_ - stage_begin_);
  stage_end_ -= std::exchange(stage_begin_, 0);
  return Status::Ok();
}

Status FrameReader::StartPart(uint32_t num_bytes) {
  if (num_bytes > in_parts_.left) {
    return Status::InvalidArgument("sent more of a message than it had announced");
  }
  run_left_ = num_bytes;
  between_parts_ = num_bytes == 0;
  return Status::Ok();
}

Status FrameReader::StartMessage(const MessageHeader& header) {
  if (header.magic != kWireMagic) {
    return Status::InvalidArgument(
        "speaks another wire format; is the same version of dad on all hosts?");
  }
  if (header.payload_bytes > kLongestPayload) {
    return Status::InvalidArgument("announced a message of " +
                                   std::to_string(header.payload_bytes) + " bytes");
  }
  const bool long_one = header.payload_bytes > kLongestWhole;
  if (long_one && between_parts_) {
    return Status::InvalidArgument("put a message of " + std::to_string(header.payload_bytes) +
                                   " bytes between two parts of another");
  }
  Incoming& message = long_one ? in_parts_ : whole_;
  message.header = header;
  if (header.payload_bytes == 0) {
    Complete(message);
    return Status::Ok();
  }
  std::byte* place = listener_->OnHeader(header);
  if (place == nullptr) {
    message.owned = AlignedBuffer(header.payload_bytes);
    place = message.owned.data();
  }
  message.at = place;
  message.left = header.payload_bytes;
  if (!long_one) run_left_ = message.left;
  return Status::Ok();
}

void FrameReader::TakeRun(size_t num_bytes) {
  Incoming& message = current();
  message.at += num_bytes;
  message.left -= num_bytes;
  run_left_ -= num_bytes;
  if (message.left == 0) Complete(message);
}

void FrameReader::Complete(Incoming& message) {
  between_parts_ = false;
  listener_->OnMessage(message.header, std::exchange(message.owned, AlignedBuffer()));
}

}  // namespace dad::tcp
