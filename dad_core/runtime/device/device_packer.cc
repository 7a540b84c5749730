#include "runtime/device/device_packer.h"

#include <cstdlib>
#include <memory>

#include "codec/cuda/pack_kernel.h"
#include "device/shared_library.h"
#include "util/log.h"

namespace dad {
namespace {

using cuda::PackKernel;

// Adds as many of the pieces to one launch as fit; returns how many that are.
size_t Fill(std::span<const DevicePacker::Piece> pieces, PackKernel::Args& args) {
  args.num_pieces = 0;
  args.blocks = 0;
  size_t taken = 0;
  for (const DevicePacker::Piece& piece : pieces) {
    if (piece.num_bytes > 0 &&
        !PackKernel::Add(args, piece.from, piece.to, static_cast<int64_t>(piece.num_bytes),
                         static_cast<int>(piece.num_zeros))) {
      break;
    }
    ++taken;
  }
  return taken;
}

}  // namespace

DevicePacker::DevicePacker(const CudaApi& cuda) : cuda_(cuda) {
  const char* given = std::getenv("DAD_CUDA_LIBRARY");
  const Result<SharedLibrary> library = SharedLibrary::Open({"libdad_cuda.so, the kernels of dad,",
                                                             given == nullptr ? "" : given,
                                                             {"libdad_cuda.so"},
                                                             "install nvcc, then reinstall dad"});
  if (library.ok() && library.value().Find("dad_cuda_pack", &pack_).ok()) return;
  DAD_LOG(Debug) << "fused buffers are copied tensor by tensor: no kernel for it here";
}

Status DevicePacker::Copy(std::span<const Piece> pieces, CudaStream stream) {
  const auto args = std::make_unique<PackKernel::Args>();
  while (pack_ != nullptr && !pieces.empty()) {
    const size_t taken = Fill(pieces, *args);
    // A piece that is too large for the kernel is copied instead.
    if (taken == 0) break;
    const CudaError error = args->blocks == 0 ? kCudaSuccess : pack_(args.get(), stream);
    if (error != kCudaSuccess) {
      // For example, the kernels were not compiled for this device. Nothing was copied.
      DAD_LOG(Warning) << "fused buffers are copied tensor by tensor: "
                       << cuda_.Check(error, "dad_cuda_pack").message();
      pack_ = nullptr;
      break;
    }
    pieces = pieces.subspan(taken);
  }
  return CopyEach(pieces, stream);
}

Status DevicePacker::CopyEach(std::span<const Piece> pieces, CudaStream stream) {
  for (const Piece& piece : pieces) {
    if (piece.num_bytes == 0) continue;
    DAD_RETURN_IF_ERROR(cuda_.Check(
        cuda_.MemcpyAsync(piece.to, piece.from, piece.num_bytes, kCudaMemcpyDefault, stream),
        "cudaMemcpyAsync"));
    if (piece.num_zeros == 0) continue;
    void* const end = static_cast<std::byte*>(piece.to) + piece.num_bytes;
    DAD_RETURN_IF_ERROR(
        cuda_.Check(cuda_.MemsetAsync(end, 0, piece.num_zeros, stream), "cudaMemsetAsync"));
  }
  return Status::Ok();
}

}  // namespace dad
