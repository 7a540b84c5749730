#include "exchange/device/bench.h"

#include <cstdlib>

#include "device/events.h"
#include "device/shared_library.h"

namespace dad {
namespace {

// The lowest major compute capability; cmake/cuda.cmake lists what the kernels are compiled for.
constexpr int kLeastMajor = 8;

std::string Setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

DeviceBench::Files DeviceBench::Files::FromEnvironment(const std::string& plugin_dir) {
  Files files{Setting("DAD_CUDA_LIBRARY"), Setting("DAD_CUBLAS_LIBRARY")};
  if (files.kernels.empty() && !plugin_dir.empty()) files.kernels = plugin_dir + "/libdad_cuda.so";
  return files;
}

Result<std::shared_ptr<DeviceBench>> DeviceBench::Find(int local_rank, const Files& files) {
  const Result<const CudaApi*> cuda = ProcessCuda();
  if (!cuda.ok()) return cuda.status();
  const Result<int> device = DeviceOfRank(*cuda.value(), local_rank);
  if (!device.ok()) return device.status();
  int value[3] = {};
  constexpr int kAttributes[] = {kCudaComputeMajor, kCudaComputeMinor, kCudaMultiprocessors};
  for (int i = 0; i < 3; ++i) {
    const Status status = cuda.value()->Check(
        cuda.value()->DeviceGetAttribute(value + i, kAttributes[i], device.value()),
        "cudaDeviceGetAttribute");
    if (!status.ok()) return Status::Unavailable(status.message());
  }
  const std::string capability = std::to_string(value[0]) + "." + std::to_string(value[1]);
  if (value[0] < kLeastMajor) {
    return Status::Unavailable("its GPU has compute capability " + capability +
                               ", dad's kernels are for 8.0 and later");
  }
  std::shared_ptr<DeviceBench> bench(new DeviceBench(*cuda.value(), device.value()));
  DAD_RETURN_IF_ERROR(bench->FindKernels(files.kernels));
  bench->FindProducts(files.cublas, "compute capability " + capability + ", " +
                                        std::to_string(value[2]) + " multiprocessors");
  return bench;
}

Status DeviceBench::Open() {
  if (pool_.has_value()) return Status::Ok();
  const CudaDeviceGuard guard(cuda_, device_);
  Result<DevicePool> pool = DevicePool::Make(cuda_, device_);
  if (!pool.ok()) return pool.status();
  pool_.emplace(std::move(pool).value());
  return Status::Ok();
}

Status DeviceBench::FindKernels(const std::string& file) {
  const Result<SharedLibrary> library = SharedLibrary::Open({"libdad_cuda.so, the kernels of dad,",
                                                             file,
                                                             {"libdad_cuda.so"},
                                                             "install nvcc, then reinstall dad"});
  if (!library.ok()) return library.status();
  size_t number = 0;
#define DAD_FIND(name, ...) \
  DAD_RETURN_IF_ERROR(library.value().Find("dad_cuda_" #name, &kernels_[number++]));
  DAD_CUDA_KERNELS(DAD_FIND)
#undef DAD_FIND
  int (*check)() = nullptr;
  int (*version)() = nullptr;
  DAD_RETURN_IF_ERROR(library.value().Find("dad_cuda_check", &check));
  DAD_RETURN_IF_ERROR(library.value().Find("dad_cuda_version", &version));
  const CudaError error = check();
  if (error == kCudaSuccess) return Status::Ok();
  const int compiled_by = version();
  return Status::Unavailable(
      "dad's kernels, compiled by CUDA " + std::to_string(compiled_by / 1000) + "." +
      std::to_string(compiled_by % 1000 / 10) + ", do not run: CUDA error " +
      std::to_string(error) + "; dadrun --doctor --gpu says which driver they need");
}

void DeviceBench::FindProducts(const std::string& file, const std::string& device_kind) {
  Result<CublasApi> cublas = LoadCublas(file);
  if (!cublas.ok()) {
    kind_ = cublas.status().message();
    return;
  }
  int version[3] = {};
  for (int i = 0; i < 3; ++i) {
    if (cublas.value().GetProperty(i, version + i) != kCublasSuccess) version[i] = -1;
  }
  cublas_ = std::move(cublas).value();
  kind_ = device_kind + ", cuBLAS " + std::to_string(version[0]) + "." +
          std::to_string(version[1]) + "." + std::to_string(version[2]);
}

Result<DeviceProducts*> DeviceBench::Products() {
  if (!cublas_.has_value()) return Status::Unavailable(kind_);
  if (!products_.has_value()) {
    const CudaDeviceGuard guard(cuda_, device_);
    Result<DeviceProducts> products = DeviceProducts::Make(*cublas_, stream());
    if (!products.ok()) return products.status();
    products_.emplace(std::move(products).value());
  }
  return &*products_;
}

Status DeviceBench::Launch(size_t number, const char* name, const void* args) {
  const CudaDeviceGuard guard(cuda_, device_);
  const CudaError error = kernels_[number](args, stream());
  if (error == kCudaSuccess) return Status::Ok();
  return Status::Aborted(std::string("kernel ") + name + ": CUDA error " + std::to_string(error));
}

Status DeviceBench::Copy(void* to, const void* from, size_t num_bytes) {
  if (num_bytes == 0) return Status::Ok();
  const CudaDeviceGuard guard(cuda_, device_);
  return cuda_.Check(cuda_.MemcpyAsync(to, from, num_bytes, kCudaMemcpyDefault, stream()),
                     "cudaMemcpyAsync");
}

Status DeviceBench::Clear(void* to, size_t num_bytes) {
  if (num_bytes == 0) return Status::Ok();
  const CudaDeviceGuard guard(cuda_, device_);
  return cuda_.Check(cuda_.MemsetAsync(to, 0, num_bytes, stream()), "cudaMemsetAsync");
}

Status DeviceBench::WaitFor(const TensorView& view) {
  if (view.ready_event == nullptr) return Status::Ok();
  const CudaDeviceGuard guard(cuda_, device_);
  return cuda_.Check(cuda_.StreamWaitEvent(stream(), static_cast<CudaEvent>(view.ready_event), 0),
                     "cudaStreamWaitEvent");
}

Result<DeviceEvent> DeviceBench::Record() {
  const CudaDeviceGuard guard(cuda_, device_);
  return RecordNewEvent(cuda_, stream());
}

void DeviceBench::KeepPinned(const DeviceEvent& event, std::shared_ptr<std::byte> block) {
  if (event == nullptr) return;
  MutexLock lock(keep_mutex_);
  while (!kept_.empty()) {
    const Result<bool> passed = EventPassed(device_, kept_.front().first);
    // An error: the device is lost, and nothing will use the memory any more.
    if (passed.ok() && !passed.value()) break;
    kept_.pop_front();
  }
  kept_.emplace_back(event, std::move(block));
}

}  // namespace dad
