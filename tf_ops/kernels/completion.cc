#include "tf_ops/kernels/completion.h"

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace dad_tensorflow {
namespace {

class Threads {
 public:
  void Run(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (num_idle_ > 0) {
      wake_.notify_one();
    } else if (num_threads_ < kMaxThreads) {
      ++num_threads_;
      std::thread([this] { Serve(); }).detach();
    }
  }

 private:
  // One does the work; the others are there for a task that takes long.
  static constexpr int kMaxThreads = 4;

  void Serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++num_idle_;
      wake_.wait(lock, [this] { return !tasks_.empty(); });
      --num_idle_;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  int num_idle_ = 0;
  int num_threads_ = 0;
};

class Timer {
 public:
  Timer() {
    std::thread([this] { Serve(); }).detach();
  }

  void Run(std::chrono::milliseconds delay, std::function<void()> task) {
    const auto when = std::chrono::ceil<Grain>(Clock::now() + delay);
    std::lock_guard lock(mutex_);
    const bool is_first = tasks_.empty() || when < tasks_.begin()->first;
    tasks_.emplace(when, std::move(task));
    if (is_first) wake_.notify_one();
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Tasks of one grain cost one wake-up.
  using Grain = std::chrono::duration<int64_t, std::centi>;

  void Serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (tasks_.empty()) {
        wake_.wait(lock);
      } else if (const auto when = tasks_.begin()->first; Clock::now() < when) {
        wake_.wait_until(lock, when);
      } else {
        std::function<void()> task = std::move(tasks_.begin()->second);
        tasks_.erase(tasks_.begin());
        lock.unlock();
        task();
        task = nullptr;
        lock.lock();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::multimap<Clock::time_point, std::function<void()>> tasks_;
};

// Never destroyed: its threads outlive main(). A forked child has none of them and starts anew.
template <typename T>
T& ThisProcess() {
  static std::mutex mutex;
  static T* instance = nullptr;
  static pid_t owner = 0;
  std::lock_guard lock(mutex);
  if (owner != getpid()) {
    instance = new T;
    owner = getpid();
  }
  return *instance;
}

}  // namespace

void RunLater(std::function<void()> task) { ThisProcess<Threads>().Run(std::move(task)); }

void RunAfter(std::chrono::milliseconds delay, std::function<void()> task) {
  ThisProcess<Timer>().Run(delay, std::move(task));
}

}  // namespace dad_tensorflow
