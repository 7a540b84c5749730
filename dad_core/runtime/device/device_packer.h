// Copies tensors into a fused buffer on a device, and out of it: with one kernel if libdad_cuda.so
// is present, otherwise with one copy each. Puts work on a stream and does not wait.
#pragma once

#include <cstddef>
#include <span>

#include "dad/status.h"
#include "device/cuda_api.h"

namespace dad {

class DevicePacker {
 public:
  struct Piece {
    const void* from = nullptr;
    void* to = nullptr;
    size_t num_bytes = 0;
    size_t num_zeros = 0;  // written behind the piece; at most 255
  };

  // Looks for libdad_cuda.so beside the core; DAD_CUDA_LIBRARY names another file. Its absence is
  // no error.
  explicit DevicePacker(const CudaApi& cuda);

  // On the current device, to which `stream` belongs.
  Status Copy(std::span<const Piece> pieces, CudaStream stream);

 private:
  Status CopyEach(std::span<const Piece> pieces, CudaStream stream);

  const CudaApi& cuda_;
  int (*pack_)(const void* args, void* stream) = nullptr;  // null: absent, or not for this device
};

}  // namespace dad
