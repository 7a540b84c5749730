#include "util/buffer_pool.h"

#include <pthread.h>

#include <bit>
#include <cstdlib>
#include <new>
#include <utility>

namespace dad {
namespace {

// What the messages and residuals of a step take, mostly. Under the address sanitizer nothing is
// kept, so that it sees who uses a block after its end.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kCapacity = 0;
#else
constexpr size_t kCapacity = size_t{256} << 20;
#endif

std::byte* Allocate(size_t num_bytes) {
  auto* block = static_cast<std::byte*>(std::aligned_alloc(BufferPool::kAlignment, num_bytes));
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

}  // namespace

BufferPool& BufferPool::OfProcess() {
  static auto* const pool = [] {
    static BufferPool* made = new BufferPool(kCapacity);
    // A child would wait for ever for a lock that another thread of its parent held.
    pthread_atfork([]() NO_THREAD_SAFETY_ANALYSIS { made->LockForFork(); },
                   []() NO_THREAD_SAFETY_ANALYSIS { made->UnlockAfterFork(); },
                   []() NO_THREAD_SAFETY_ANALYSIS { made->UnlockAfterFork(); });
    return made;
  }();
  return *pool;
}

size_t BufferPool::Rounded(size_t num_bytes) {
  const size_t step = num_bytes < kLeastBytes ? kAlignment : std::bit_floor(num_bytes) / 8;
  return (num_bytes + step - 1) / step * step;
}

std::byte* BufferPool::Take(size_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  const size_t rounded = Rounded(num_bytes);
  if (num_bytes >= kLeastBytes) {
    MutexLock lock(mutex_);
    if (const auto found = kept_.find(rounded); found != kept_.end()) {
      std::byte* const block = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) kept_.erase(found);
      kept_bytes_ -= rounded;
      return block;
    }
  }
  return Allocate(rounded);
}

void BufferPool::Give(std::byte* block, size_t num_bytes) {
  if (block == nullptr) return;
  const size_t rounded = Rounded(num_bytes);
  if (num_bytes >= kLeastBytes) {
    MutexLock lock(mutex_);
    if (kept_bytes_ + rounded <= capacity_) {
      kept_[rounded].push_back(block);
      kept_bytes_ += rounded;
      return;
    }
  }
  std::free(block);
}

void BufferPool::Trim() {
  std::map<size_t, std::vector<std::byte*>> kept;
  {
    MutexLock lock(mutex_);
    kept = std::exchange(kept_, {});
    kept_bytes_ = 0;
  }
  for (const auto& [size, blocks] : kept) {
    for (std::byte* block : blocks) std::free(block);
  }
}

size_t BufferPool::kept_bytes() const {
  MutexLock lock(mutex_);
  return kept_bytes_;
}

}  // namespace dad
