// A thread that waits for sockets and calls their handlers. Sleeps as long as nothing happens
// (gloo's own loop wakes up a hundred times a second).
#pragma once

#include <cstdint>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace dad::tcp {

class EventLoop {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    // EPOLLIN, EPOLLOUT … as epoll reports them. On the loop's thread; must not throw.
    virtual void OnEvents(uint32_t events) = 0;
  };

  EventLoop();
  ~EventLoop();  // all sockets have been removed by then
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  void Add(int fd, uint32_t events, Handler* handler);
  // Any thread; does not wait for handlers.
  void Change(int fd, uint32_t events);
  // When it returns on another thread than the loop's, the handler is not being called and will not
  // be.
  void Forget(int fd);
  // Waits for handlers that are being called; not on the loop's thread.
  void Settle() { std::lock_guard<std::mutex> lock(mutex_); }

 private:
  void Run();

  const int epoll_;
  const int wake_;                              // an eventfd that signals the end
  std::mutex mutex_;                            // held while handlers are called
  std::unordered_map<int, Handler*> handlers_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace dad::tcp
