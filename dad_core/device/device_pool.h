// A stream and device memory for the work on it. A block that was returned is handed out again at
// once: its next user comes later on the same stream, so neither host nor device has to wait.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "device/cuda_api.h"
#include "util/mutex.h"

namespace dad {

using DeviceBlock = std::shared_ptr<std::byte>;

// Thread-safe: a block may go back from any thread, also when the pool is gone.
class DevicePool {
 public:
  // A new stream of `device`, which is current for the calling thread.
  static Result<DevicePool> Make(const CudaApi& cuda, int device);

  CudaStream stream() const { return shelf_->stream; }

  // At least `num_bytes`, at a multiple of 256, not initialised; null for none. For use on the
  // stream only.
  Result<DeviceBlock> Take(size_t num_bytes);

 private:
  struct Shelf {
    Shelf(const CudaApi& api, int index) : cuda(api), device(index) {}
    ~Shelf();
    void Give(void* block, size_t size);

    const CudaApi& cuda;
    const int device;
    CudaStream stream = nullptr;
    Mutex mutex;
    std::map<size_t, std::vector<void*>> free GUARDED_BY(mutex);  // by size
    size_t held GUARDED_BY(mutex) = 0;
  };
  explicit DevicePool(std::shared_ptr<Shelf> shelf) : shelf_(std::move(shelf)) {}

  std::shared_ptr<Shelf> shelf_;
};

}  // namespace dad
