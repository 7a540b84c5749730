#include "device/pinned_pool.h"

#include <algorithm>
#include <bit>

namespace dad {
namespace {

constexpr size_t kSmallest = 4096;

}  // namespace

PinnedPool::Shelf::~Shelf() {
  for (auto& [size, blocks] : free) {
    for (void* block : blocks) (void)cuda.FreeHost(block);
  }
}

Result<std::shared_ptr<std::byte>> PinnedPool::Take(size_t num_bytes) {
  // Powers of two, so that a block fits again though shapes differ.
  const size_t size = std::bit_ceil(std::max(num_bytes, kSmallest));
  void* block = nullptr;
  {
    MutexLock lock(shelf_->mutex);
    std::vector<void*>& blocks = shelf_->free[size];
    if (!blocks.empty()) {
      block = blocks.back();
      blocks.pop_back();
    }
  }
  if (block == nullptr) {
    const CudaApi& cuda = shelf_->cuda;
    DAD_RETURN_IF_ERROR(cuda.Check(cuda.HostAlloc(&block, size, 0), "cudaHostAlloc"));
  }
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(block),
                                    [shelf = shelf_, size](std::byte* back) {
                                      MutexLock lock(shelf->mutex);
                                      shelf->free[size].push_back(back);
                                    });
}

}  // namespace dad
