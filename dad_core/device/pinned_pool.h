// Page-locked host memory, which a device copies to and from without stopping anybody. Allocating
// it is slow and freeing it may wait for the device, so blocks are kept and used again.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "device/cuda_api.h"
#include "util/mutex.h"

namespace dad {

// Thread-safe: a block may go back from any thread, also when the pool is gone.
class PinnedPool {
 public:
  explicit PinnedPool(const CudaApi& cuda) : shelf_(std::make_shared<Shelf>(cuda)) {}

  // At least `num_bytes`, at a multiple of 256; goes back with the last reference.
  Result<std::shared_ptr<std::byte>> Take(size_t num_bytes);

 private:
  struct Shelf {
    explicit Shelf(const CudaApi& api) : cuda(api) {}
    ~Shelf();
    const CudaApi& cuda;
    Mutex mutex;
    std::map<size_t, std::vector<void*>> free GUARDED_BY(mutex);  // by size
  };
  std::shared_ptr<Shelf> shelf_;
};

}  // namespace dad
