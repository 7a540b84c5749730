// Large blocks of memory that are used again. A message of megabytes comes in every step; memory
// that the allocator has given back to the system costs a page fault for every 4 KiB of it when the
// next one is written. Thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "dad/export.h"
#include "util/mutex.h"

namespace dad {

class DAD_EXPORT BufferPool {
 public:
  static constexpr size_t kAlignment = 64;
  // Smaller blocks are left to the allocator, which keeps them by itself.
  static constexpr size_t kLeastBytes = 64 << 10;

  // `capacity`: most bytes that are kept while nobody uses them.
  explicit BufferPool(size_t capacity) : capacity_(capacity) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool() { Trim(); }

  // The pool of this process, used by AlignedBuffer. It is never destroyed and works in a forked
  // child.
  static BufferPool& OfProcess();

  // Not initialised. Throws std::bad_alloc.
  std::byte* Take(size_t num_bytes);
  // A block of Take, with the same size.
  void Give(std::byte* block, size_t num_bytes);
  // Gives what nobody uses back to the system.
  void Trim();
  size_t kept_bytes() const;

 private:
  void LockForFork() ACQUIRE(mutex_) { mutex_.Lock(); }
  void UnlockAfterFork() RELEASE(mutex_) { mutex_.Unlock(); }

  // Sizes come in eight steps to a power of two, so that messages of nearly one size share blocks.
  static size_t Rounded(size_t num_bytes);

  const size_t capacity_;
  mutable Mutex mutex_;
  size_t kept_bytes_ GUARDED_BY(mutex_) = 0;
  std::map<size_t, std::vector<std::byte*>> kept_ GUARDED_BY(mutex_);  // by rounded size
};

}  // namespace dad
