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
// Longer ones are no messages of ours, whatever the header says.
constexpr uint64_t kLongestPayload = uint64_t{1} << 38;

}  // namespace

FrameReader::FrameReader(Traffic* traffic, Listener* listener)
    : traffic_(traffic), listener_(listener), stage_(new std::byte[kStageBytes]) {}

Status FrameReader::ReadSome(int fd) {
  for (size_t read = 0; read < kBytesPerTurn;) {
    // TakeStaged leaves less than a header, at the front of the stage.
    iovec places[2] = {{payload_at_, std::min(payload_left_, kBytesPerTurn)},
                       {stage_.get() + stage_end_, kStageBytes - stage_end_}};
    // The stage may follow the payload only if that is read to its end.
    const bool with_stage = places[0].iov_len == payload_left_;
    msghdr call{};
    call.msg_iov = in_payload() ? places : places + 1;
    call.msg_iovlen = in_payload() && with_stage ? 2 : 1;
    const size_t asked =
        in_payload() ? places[0].iov_len + (with_stage ? places[1].iov_len : 0) : places[1].iov_len;

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
    const size_t of_payload = std::min(static_cast<size_t>(got), payload_left_);
    stage_end_ += static_cast<size_t>(got) - of_payload;
    if (of_payload > 0) TakePayload(of_payload);
    DAD_RETURN_IF_ERROR(TakeStaged());
    if (static_cast<size_t>(got) < asked) return Status::Ok();  // the socket is empty
  }
  return Status::Ok();
}

Status FrameReader::TakeStaged() {
  while (stage_begin_ < stage_end_) {
    const size_t staged = stage_end_ - stage_begin_;
    if (!in_payload()) {
      if (staged < sizeof header_) break;
      std::memcpy(&header_, stage_.get() + stage_begin_, sizeof header_);
      stage_begin_ += sizeof header_;
      DAD_RETURN_IF_ERROR(StartMessage());
      continue;
    }
    const size_t num_bytes = std::min(staged, payload_left_);
    std::memcpy(payload_at_, stage_.get() + stage_begin_, num_bytes);
    stage_begin_ += num_bytes;
    TakePayload(num_bytes);
  }
  std::memmove(stage_.get(), stage_.get() + stage_begin_, stage_end_ - stage_begin_);
  stage_end_ -= std::exchange(stage_begin_, 0);
  return Status::Ok();
}

Status FrameReader::StartMessage() {
  if (header_.magic != kWireMagic) {
    return Status::InvalidArgument(
        "speaks another wire format; is the same version of dad on all hosts?");
  }
  if (header_.payload_bytes > kLongestPayload) {
    return Status::InvalidArgument("announced a message of " +
                                   std::to_string(header_.payload_bytes) + " bytes");
  }
  if (header_.payload_bytes == 0) {
    listener_->OnMessage(header_, {});
    return Status::Ok();
  }
  payload_left_ = header_.payload_bytes;
  payload_at_ = listener_->OnHeader(header_);
  if (payload_at_ == nullptr) {
    owned_ = AlignedBuffer(payload_left_);
    payload_at_ = owned_.data();
  }
  return Status::Ok();
}

void FrameReader::TakePayload(size_t num_bytes) {
  payload_at_ += num_bytes;
  payload_left_ -= num_bytes;
  if (payload_left_ == 0) listener_->OnMessage(header_, std::exchange(owned_, AlignedBuffer()));
}

}  // namespace dad::tcp
