// What exchanges that compute on a device work with: a stream with device memory, page-locked
// memory, the kernels of libdad_cuda.so, and cuBLAS where it is. One per engine, on the device of
// its local rank. All work is put on one stream, in the order of the calls; nothing here waits.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "codec/cuda/kernel_list.h"
#include "dad/device.h"
#include "dad/status.h"
#include "dad/tensor_view.h"
#include "device/cuda_api.h"
#include "device/device_pool.h"
#include "device/pinned_pool.h"
#include "device/products.h"
#include "util/mutex.h"

namespace dad {

// An entry of libdad_cuda.so: takes the kernel's Args and a stream, gives a cudaError_t.
using KernelEntry = int (*)(const void* args, void* stream);

namespace cuda {

enum class KernelNumber : size_t {
#define DAD_NUMBER(name, ...) k_##name,
  DAD_CUDA_KERNELS(DAD_NUMBER)
#undef DAD_NUMBER
      kCount
};

// Where a kernel stands in the list.
template <typename Kernel>
struct NumberOf;
#define DAD_NUMBER(name, ...)                                      \
  template <>                                                      \
  struct NumberOf<__VA_ARGS__> {                                   \
    static constexpr KernelNumber kValue = KernelNumber::k_##name; \
    static constexpr const char* kName = #name;                    \
  };
DAD_CUDA_KERNELS(DAD_NUMBER)
#undef DAD_NUMBER

}  // namespace cuda

class DeviceBench {
 public:
  // The libraries that are wanted, instead of those that are found.
  struct Files {
    std::string kernels;  // DAD_CUDA_LIBRARY
    std::string cublas;   // DAD_CUBLAS_LIBRARY
    static Files FromEnvironment(const std::string& plugin_dir);
  };

  // Looks at what is there and puts nothing on the device: a job that has no device tensors must
  // not pay for it. kUnavailable, saying what is missing and the command that brings it, if there
  // is no device for `local_rank`, or no kernels for it.
  static Result<std::shared_ptr<DeviceBench>> Find(int local_rank, const Files& files);

  int device() const { return device_; }
  bool has_products() const { return cublas_.has_value(); }
  // The kind of device and cuBLAS: where these texts are equal, products have the same bits.
  // Without cuBLAS, what is missing.
  const std::string& kind() const { return kind_; }

  // Before any call below; at the first the device is touched. Worker only.
  Status Open();
  // kUnavailable without cuBLAS. Worker only.
  Result<DeviceProducts*> Products();

  // Any thread, in an order that the callers see to: the device is made current for the call.
  const CudaApi& cuda() const { return cuda_; }
  CudaStream stream() const { return pool_->stream(); }
  Result<DeviceBlock> Take(size_t num_bytes) { return pool_->Take(num_bytes); }
  Result<std::shared_ptr<std::byte>> TakePinned(size_t num_bytes) {
    return pinned_.Take(num_bytes);
  }
  template <typename Kernel>
  Status Run(const typename Kernel::Args& args) {
    using Number = cuda::NumberOf<Kernel>;
    return Launch(static_cast<size_t>(Number::kValue), Number::kName, &args);
  }
  Status Copy(void* to, const void* from, size_t num_bytes);
  Status Clear(void* to, size_t num_bytes);
  // What follows comes after the view's producer.
  Status WaitFor(const TensorView& view);
  // An event after all that was put on the stream.
  Result<DeviceEvent> Record();
  // Holds page-locked memory until the event has passed. Not KeepUntil of dad/device.h, which
  // may let go of a framework's tensors: the worker must not.
  void KeepPinned(const DeviceEvent& event, std::shared_ptr<std::byte> block);

 private:
  DeviceBench(const CudaApi& cuda, int device) : cuda_(cuda), device_(device), pinned_(cuda) {}
  Status FindKernels(const std::string& file);
  void FindProducts(const std::string& file, const std::string& device_kind);
  Status Launch(size_t number, const char* name, const void* args);

  const CudaApi& cuda_;
  const int device_;
  PinnedPool pinned_;
  std::array<KernelEntry, static_cast<size_t>(cuda::KernelNumber::kCount)> kernels_ = {};
  std::optional<CublasApi> cublas_;
  std::string kind_;
  Mutex keep_mutex_;
  std::deque<std::pair<DeviceEvent, std::shared_ptr<std::byte>>> kept_;  // in the stream's order
  // Once open.
  std::optional<DevicePool> pool_;
  std::optional<DeviceProducts> products_;
};

}  // namespace dad
