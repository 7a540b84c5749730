// The C face of libdad_mpi_<flavour>.so.
#include <mpi.h>

#include <cstring>
#include <exception>
#include <string>

#include "transport/mpi/mpi_transport.h"
#include "transport/plugin_abi.h"
#include "transport/registry.h"

#define DAD_EXPORT extern "C" __attribute__((visibility("default")))

DAD_EXPORT const char* dad_plugin_abi() {
  static const std::string abi = dad::MakePluginAbi();
  return abi.c_str();
}

DAD_EXPORT const char* dad_plugin_describe() {
  static const std::string text = [] {
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(version, &length);
    // Some versions print their whole configuration.
    const std::string line = std::string(version).substr(0, std::strcspn(version, ",\n"));
    return "payloads by MPI (" DAD_MPI_FLAVOUR ": " + line + "), control by gloo";
  }();
  return text.c_str();
}

DAD_EXPORT dad::Transport* dad_plugin_connect(const dad::PluginArgs* args, char* error,
                                              size_t error_size) {
  try {
    auto transport =
        dad::mpi_transport::MpiTransport::Connect(*args->world, *args->options, args->control);
    if (transport.ok()) return std::move(transport).value().release();
    dad::WritePluginError(transport.status(), error, error_size);
  } catch (const std::exception& failure) {
    dad::WritePluginError(dad::Status::Internal(failure.what()), error, error_size);
  }
  return nullptr;
}

// Every rank calls it. True: `out` has the text of rank 0; false: an error, as from connect.
DAD_EXPORT bool dad_plugin_bootstrap(const char* mine, char* out, size_t out_size) {
  try {
    dad::Result<dad::mpi_transport::MpiWorld*> world = dad::mpi_transport::MpiWorld::Get();
    dad::Result<std::string> text = world.ok() ? world.value()->Broadcast(mine) : world.status();
    if (text.ok() && text.value().size() >= out_size) {
      text = dad::Status::InvalidArgument("the text of rank 0 is too long");
    }
    if (text.ok()) {
      std::memcpy(out, text.value().c_str(), text.value().size() + 1);
      return true;
    }
    dad::WritePluginError(text.status(), out, out_size);
  } catch (const std::exception& failure) {
    dad::WritePluginError(dad::Status::Internal(failure.what()), out, out_size);
  }
  return false;
}
