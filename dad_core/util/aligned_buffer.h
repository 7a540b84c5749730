// A block of memory aligned for vector loads. Owns it; moves, never copies. Not
// initialised. Large ones come from a pool.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "util/buffer_pool.h"

namespace dad {

class AlignedBuffer {
 public:
  static constexpr size_t kAlignment = BufferPool::kAlignment;

  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t num_bytes)
      : data_(BufferPool::OfProcess().Take(num_bytes)), size_(num_bytes) {}
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~AlignedBuffer() {
    if (data_ != nullptr) BufferPool::OfProcess().Give(data_, size_);
  }

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<std::byte> span() { return {data_, size_}; }
  std::span<const std::byte> span() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace dad
