#include "device/cublas_api.h"

#include "device/shared_library.h"

namespace dad {

Result<CublasApi> LoadCublas(const std::string& path) {
  Result<SharedLibrary> library =
      SharedLibrary::Open({"cuBLAS",
                           path,
                           {"libcublas.so.13", "libcublas.so.12", "libcublas.so"},
                           "pip install nvidia-cublas, or nvidia-cublas-cu12 for CUDA 12"});
  if (!library.ok()) return library.status();
  CublasApi api;
  api.library = library.value().name();
#define DAD_FIND(symbol, name, parameters) \
  DAD_RETURN_IF_ERROR(library.value().Find("cublas" #symbol, &api.name));
  DAD_CUBLAS_FUNCTIONS(DAD_FIND)
#undef DAD_FIND
  return api;
}

}  // namespace dad
