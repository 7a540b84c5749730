#include "device/cuda_api.h"

#include <cstdlib>

#include "device/shared_library.h"
#include "util/mutex.h"

namespace dad {

Status CudaApi::Check(CudaError error, const char* call) const {
  if (error == kCudaSuccess) return Status::Ok();
  (void)GetLastError();
  const std::string message = std::string(call) + ": " + GetErrorString(error);
  return error == kCudaNoMemory ? Status::Unavailable(message) : Status::Aborted(message);
}

Result<CudaApi> LoadCuda(const std::string& path) {
  Result<SharedLibrary> library =
      SharedLibrary::Open({"the CUDA runtime",
                           path,
                           {"libcudart.so.13", "libcudart.so.12", "libcudart.so"},
                           "pip install nvidia-cuda-runtime, or a CUDA build of the framework"});
  if (!library.ok()) return library.status();
  CudaApi api;
  api.library = library.value().name();
#define DAD_FIND(name, result, parameters) \
  DAD_RETURN_IF_ERROR(library.value().Find("cuda" #name, &api.name));
  DAD_CUDA_FUNCTIONS(DAD_FIND)
#undef DAD_FIND
  return api;
}

Result<const CudaApi*> ProcessCuda() {
  static Mutex mutex;
  static const CudaApi* loaded = nullptr;
  MutexLock lock(mutex);
  if (loaded == nullptr) {  // after a failure again: a framework may bring it later
    const char* path = std::getenv("DAD_CUDART_LIBRARY");
    Result<CudaApi> cuda = LoadCuda(path == nullptr ? "" : path);
    if (!cuda.ok()) return cuda.status();
    loaded = new CudaApi(std::move(cuda).value());
  }
  return loaded;
}

Result<int> CountCudaDevices(const CudaApi& cuda) {
  int driver = 0;
  if (cuda.DriverGetVersion(&driver) != kCudaSuccess || driver == 0) {
    (void)cuda.GetLastError();
    return Status::Unavailable("there is no NVIDIA driver here; nvidia-smi must work first");
  }
  int count = 0;
  const Status counted = cuda.Check(cuda.GetDeviceCount(&count), "cudaGetDeviceCount");
  if (!counted.ok()) return Status::Unavailable(counted.message());
  if (count == 0) {
    return Status::Unavailable(
        "no CUDA device is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES");
  }
  return count;
}

Result<int> DeviceOfRank(const CudaApi& cuda, int local_rank) {
  const Result<int> devices = CountCudaDevices(cuda);
  if (!devices.ok()) return devices.status();
  if (local_rank < devices.value()) return local_rank;
  if (devices.value() == 1) return 0;
  return Status::Unavailable("local rank " + std::to_string(local_rank) +
                             " needs a CUDA device of its own, there are " +
                             std::to_string(devices.value()));
}

CudaDeviceGuard::CudaDeviceGuard(const CudaApi& cuda, int device) : cuda_(cuda) {
  int current = -1;
  if (cuda_.GetDevice(&current) == kCudaSuccess && current != device &&
      cuda_.SetDevice(device) == kCudaSuccess) {
    previous_ = current;
  }
}

CudaDeviceGuard::~CudaDeviceGuard() {
  if (previous_ >= 0) (void)cuda_.SetDevice(previous_);
}

}  // namespace dad
