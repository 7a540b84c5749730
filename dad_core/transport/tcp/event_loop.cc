#include "transport/tcp/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

namespace dad::tcp {
namespace {

int Checked(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return fd;
}

}  // namespace

EventLoop::EventLoop()
    : epoll_(Checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(Checked(eventfd(0, EFD_CLOEXEC), "eventfd")) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = wake_;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  thread_ = std::thread([this] { Run(); });
}

EventLoop::~EventLoop() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof one);
  thread_.join();
  close(wake_);
  close(epoll_);
}

void EventLoop::Add(int fd, uint32_t events, Handler* handler) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    handlers_[fd] = handler;
  }
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

void EventLoop::Change(int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::Forget(int fd) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
  if (std::this_thread::get_id() == thread_.get_id()) {
    handlers_.erase(fd);  // called from a handler: Run holds the lock
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    handlers_.erase(fd);
  }
}

void EventLoop::Run() {
  std::array<epoll_event, 64> events;
  for (;;) {
    const int count = epoll_wait(epoll_, events.data(), events.size(), -1);
    if (count < 0 && errno != EINTR) return;
    std::lock_guard<std::mutex> lock(mutex_);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd == wake_) return;
      // A handler that was removed since, or by an earlier handler of this turn, is not there.
      const auto found = handlers_.find(events[i].data.fd);
      if (found != handlers_.end()) found->second->OnEvents(events[i].events);
    }
  }
}

}  // namespace dad::tcp
