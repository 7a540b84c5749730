// The C interface of libdad_nccl.so. It needs neither CUDA nor NCCL to be opened, and looks for
// both when it is asked to connect. DAD_CUDART_LIBRARY and DAD_NCCL_LIBRARY name other files.
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>

#include "transport/nccl/nccl_transport.h"
#include "transport/plugin_abi.h"
#include "transport/registry.h"

#define DAD_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::string Setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

dad::Result<std::shared_ptr<const dad::nccl::Libraries>> Load() {
  auto libraries = std::make_shared<dad::nccl::Libraries>();
  dad::Result<dad::CudaApi> cuda = dad::LoadCuda(Setting("DAD_CUDART_LIBRARY"));
  if (!cuda.ok()) return cuda.status();
  dad::Result<dad::nccl::NcclApi> nccl = dad::nccl::LoadNccl(Setting("DAD_NCCL_LIBRARY"));
  if (!nccl.ok()) return nccl.status();
  libraries->cuda = std::move(cuda).value();
  libraries->nccl = std::move(nccl).value();
  return std::shared_ptr<const dad::nccl::Libraries>(std::move(libraries));
}

}  // namespace

DAD_EXPORT const char* dad_plugin_abi() {
  static const std::string abi = dad::MakePluginAbi();
  return abi.c_str();
}

DAD_EXPORT const char* dad_plugin_describe() {
  static const std::string text = [] {
    const auto libraries = Load();
    if (!libraries.ok()) return libraries.status().message();
    const dad::Result<int> devices = dad::CountCudaDevices(libraries.value()->cuda);
    return "CUDA tensors by NCCL " + dad::nccl::VersionText(libraries.value()->nccl.version) +
           ", control by gloo; " +
           (devices.ok() ? std::to_string(devices.value()) + " devices"
                         : devices.status().message());
  }();
  return text.c_str();
}

DAD_EXPORT dad::Transport* dad_plugin_connect(const dad::PluginArgs* args, char* error,
                                              size_t error_size) {
  try {
    auto libraries = Load();
    if (libraries.ok()) {
      const dad::Result<int> device =
          dad::DeviceOfRank(libraries.value()->cuda, args->world->local_rank);
      if (!device.ok()) {
        dad::WritePluginError(device.status(), error, error_size);
        return nullptr;
      }
      auto transport = dad::nccl::NcclTransport::Connect(
          libraries.value(), device.value(), args->control,
          std::chrono::duration_cast<dad::Transport::Millis>(
              std::chrono::duration<double>(args->options->start_timeout_seconds)));
      if (transport.ok()) return std::move(transport).value().release();
      dad::WritePluginError(transport.status(), error, error_size);
    } else {
      dad::WritePluginError(libraries.status(), error, error_size);
    }
  } catch (const std::exception& failure) {
    dad::WritePluginError(dad::Status::Internal(failure.what()), error, error_size);
  }
  return nullptr;
}

// Returns an empty text, or why this process cannot use NCCL. Meets nobody.
DAD_EXPORT const char* dad_plugin_usable(int local_rank) {
  static thread_local std::string why;
  why.clear();
  try {
    const auto libraries = Load();
    const dad::Status status = libraries.ok()
                                   ? dad::DeviceOfRank(libraries.value()->cuda, local_rank).status()
                                   : libraries.status();
    why = status.message();
  } catch (const std::exception& failure) {
    why = failure.what();
  }
  return why.c_str();
}
