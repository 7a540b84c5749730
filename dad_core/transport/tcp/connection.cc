#include "transport/tcp/connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace dad::tcp {
namespace {

// A round is done when its slowest message is, so connections that share a line should share it
// evenly. BBR does not within a round (steps measured 1.15 to 1.2 times as long). If it is the
// default, a congestion control that reacts to losses is requested.
void ShareEvenly(int fd) {
  char control[16] = {};
  socklen_t size = sizeof control - 1;
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, &size) != 0) return;
  if (!std::string_view(control).starts_with("bbr")) return;
  for (const char* other : {"cubic", "reno"}) {
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, other, std::strlen(other)) == 0) return;
  }
}

}  // namespace

Connection::Connection(int fd, int peer, EventLoop* loop, ConnectionListener* listener,
                       Traffic* traffic)
    : fd_(fd),
      peer_(peer),
      loop_(loop),
      listener_(listener),
      reader_(traffic, this),
      writer_(traffic, [this](int watched, bool on) {
        loop_->Change(watched, on ? EPOLLIN | EPOLLOUT : EPOLLIN);
      }) {
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ShareEvenly(fd_);
}

void Connection::Start() {
  loop_->Add(fd_, EPOLLIN, this);
  writer_.Open(fd_);
}

void Connection::Close() {
  // If the loop's thread is just handling its loss, wait until that is over.
  if (!Shut()) loop_->Settle();
}

bool Connection::Shut() {
  if (!open_.exchange(false)) return false;
  writer_.Close();
  loop_->Forget(fd_);
  close(fd_);
  return true;
}

void Connection::OnEvents(uint32_t events) {
  try {
    if ((events & EPOLLOUT) != 0) writer_.OnWritable();
    if ((events & ~static_cast<uint32_t>(EPOLLOUT)) == 0) return;
    if (Status read = reader_.ReadSome(fd_); !read.ok()) Lose(read);
  } catch (const std::exception& error) {  // for example out of memory
    Lose(Status::Aborted(error.what()));
  }
}

void Connection::Lose(const Status& why) {
  const std::string write_error = writer_.error();
  std::string reason = write_error.empty() ? why.message() : write_error;
  // Its messages were in order: it did not leave because of us.
  if (why.code() == StatusCode::kAborted) reason += ": it ended or was killed, its output says why";
  if (!Shut()) return;  // we are closing it ourselves
  listener_->OnLost(peer_, Status::Aborted("rank " + std::to_string(peer_) + ": " + reason));
}

std::byte* Connection::OnHeader(const MessageHeader& header) {
  return listener_->OnHeader(peer_, header);
}

void Connection::OnMessage(const MessageHeader& header, AlignedBuffer payload) {
  listener_->OnMessage(peer_, header, std::move(payload));
}

}  // namespace dad::tcp
