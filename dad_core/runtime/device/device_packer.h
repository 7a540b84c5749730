// Copies tensors into a fused buffer on a device, and out of it: all of them by one kernel where
// libdad_cuda.so is, else by a copy each. Puts work on a stream and does not wait.
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

  // Looks for libdad_cuda.so, which lies beside the core; DAD_CUDA_LIBRARY names another file. Its
  // absence is no error.
  explicit DevicePacker(const CudaApi& cuda);

  // On the current device, to which `stream` belongs.
  Status Copy(std::span<const Piece> pieces, CudaStream stream);

 private:
  Status CopyEach(std::span<const Piece> pieces, CudaStream stream);

  const CudaApi& cuda_;
  int (*pack_)(const void* args, void* stream) = nullptr;  // null: not there, or not for the device
};

}  // namespace dad
