#include "device/device_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "device/events.h"

namespace dad {
namespace {

// What lies unused: more is given back to CUDA, for the framework.
constexpr size_t kMostHeld = size_t{512} << 20;
constexpr size_t kSmallest = 512;

// The same tensors come in every step, so large sizes fit again as they are; small ones share.
size_t SizeFor(size_t num_bytes) {
  constexpr size_t kExactFrom = 1 << 20;
  if (num_bytes < kExactFrom) return std::bit_ceil(std::max(num_bytes, kSmallest));
  return (num_bytes + kSmallest - 1) / kSmallest * kSmallest;
}

}  // namespace

DevicePool::Shelf::~Shelf() {
  if (stream == nullptr) return;
  const CudaDeviceGuard guard(cuda, device);
  for (auto& [size, blocks] : free) {
    for (void* block : blocks) (void)cuda.FreeAsync(block, stream);
  }
  (void)cuda.StreamDestroy(stream);  // when it has done what is on it
}

void DevicePool::Shelf::Give(void* block, size_t size) {
  {
    MutexLock lock(mutex);
    if (held + size <= kMostHeld) {
      held += size;
      free[size].push_back(block);
      return;
    }
  }
  const CudaDeviceGuard guard(cuda, device);
  (void)cuda.FreeAsync(block, stream);
}

Result<DevicePool> DevicePool::Make(const CudaApi& cuda, int device) {
  auto shelf = std::make_shared<Shelf>(cuda, device);
  Result<CudaStream> stream = NewStream(cuda);
  if (!stream.ok()) return stream.status();
  shelf->stream = stream.value();
  return DevicePool(std::move(shelf));
}

Result<DeviceBlock> DevicePool::Take(size_t num_bytes) {
  if (num_bytes == 0) return DeviceBlock();
  const size_t size = SizeFor(num_bytes);
  void* block = nullptr;
  {
    MutexLock lock(shelf_->mutex);
    std::vector<void*>& blocks = shelf_->free[size];
    if (!blocks.empty()) {
      block = blocks.back();
      blocks.pop_back();
      shelf_->held -= size;
    }
  }
  if (block == nullptr) {
    const CudaApi& cuda = shelf_->cuda;
    const CudaDeviceGuard guard(cuda, shelf_->device);
    DAD_RETURN_IF_ERROR(
        cuda.Check(cuda.MallocAsync(&block, size, shelf_->stream), "cudaMallocAsync"));
  }
  return DeviceBlock(static_cast<std::byte*>(block),
                     [shelf = shelf_, size](std::byte* back) { shelf->Give(back, size); });
}

}  // namespace dad
