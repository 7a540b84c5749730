#include "transport/nccl/nccl_api.h"

#include "device/shared_library.h"

namespace dad::nccl {

Result<NcclApi> LoadNccl(const std::string& path) {
  Result<SharedLibrary> library =
      SharedLibrary::Open({"NCCL",
                           path,
                           {"libnccl.so.2"},
                           "pip install nvidia-nccl-cu13, or nvidia-nccl-cu12 for CUDA 12"});
  if (!library.ok()) return library.status();
  NcclApi api;
  api.library = library.value().name();
#define DAD_FIND(name, result, parameters) \
  DAD_RETURN_IF_ERROR(library.value().Find("nccl" #name, &api.name));
  DAD_NCCL_FUNCTIONS(DAD_FIND)
#undef DAD_FIND
  if (api.GetVersion(&api.version) != kSuccess || api.version < kOldestVersion) {
    return Status::Unavailable("NCCL " + VersionText(api.version) +
                               " is too old; dad needs 2.14 (pip install nvidia-nccl-cu13)");
  }
  return api;
}

std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Result<DataType> ToNccl(DType dtype) {
  switch (dtype) {
    case DType::kInt8: return 0;
    case DType::kUint8: return kUint8;
    case DType::kInt32: return 2;
    case DType::kInt64: return 4;
    case DType::kFloat16: return 6;
    case DType::kFloat32: return 7;
    case DType::kFloat64: return 8;
    case DType::kBFloat16: return 9;
    default: return Status::InvalidArgument(std::string("NCCL does not add up ") + Name(dtype));
  }
}

Result<RedOp> ToNccl(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kSum: return 0;
    case ReduceOp::kProduct: return 1;
    case ReduceOp::kMax: return 2;
    case ReduceOp::kMin: return 3;
    case ReduceOp::kAverage:
      if (IsFloating(dtype)) return 4;
      break;
    default: break;
  }
  return Status::InvalidArgument(std::string("NCCL has no ") + Name(op) + " of " + Name(dtype));
}

}  // namespace dad::nccl
