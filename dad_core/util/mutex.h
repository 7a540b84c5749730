// A mutex that clang can check: what is GUARDED_BY one is touched only where it is held, else
// `make tidy` fails. Other compilers see std::mutex and nothing else.
//
//   Mutex mutex_;
//   std::vector<Event> events_ GUARDED_BY(mutex_);
//
//   const MutexLock lock(mutex_);
//
// A condition is waited for in a loop, not with a predicate: clang does not know that a lambda is
// called under the lock.
//
//   MutexLock lock(mutex_);
//   while (events_.empty()) posted_.Wait(lock);
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define DAD_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define DAD_THREAD_ANNOTATION(x)
#endif

#define CAPABILITY(x) DAD_THREAD_ANNOTATION(capability(x))
#define SCOPED_CAPABILITY DAD_THREAD_ANNOTATION(scoped_lockable)
#define GUARDED_BY(x) DAD_THREAD_ANNOTATION(guarded_by(x))
#define PT_GUARDED_BY(x) DAD_THREAD_ANNOTATION(pt_guarded_by(x))
#define REQUIRES(...) DAD_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) DAD_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) DAD_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) DAD_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS DAD_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace dad {

class CAPABILITY("mutex") Mutex {
 public:
  void Lock() ACQUIRE() { mutex_.lock(); }
  void Unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex as long as it lives, except between Unlock and Lock.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  ~MutexLock() RELEASE() {}

  void Unlock() RELEASE() { lock_.unlock(); }
  void Lock() ACQUIRE() { lock_.lock(); }

 private:
  friend class Condition;
  std::unique_lock<std::mutex> lock_;
};

// Called with the mutex of the condition held. Waits may end early.
class Condition {
 public:
  void Wait(MutexLock& lock) { changed_.wait(lock.lock_); }
  void WaitUntil(MutexLock& lock, std::chrono::steady_clock::time_point deadline) {
    changed_.wait_until(lock.lock_, deadline);
  }
  void NotifyOne() { changed_.notify_one(); }
  void NotifyAll() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace dad
