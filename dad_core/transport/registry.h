// Finds a transport by name. The only place that lists backends.
#pragma once

#include <cstddef>
#include <cstdio>
#include <memory>
#include <string>

#include "dad/engine.h"
#include "dad/plugins.h"
#include "dad/status.h"
#include "transport/transport.h"

namespace dad {

// What a plug-in exports, with C linkage, under these names:
//   const char* dad_plugin_abi();       MakePluginAbi() as the plug-in was compiled
//   const char* dad_plugin_describe();  one line for --check-build
//   Transport* dad_plugin_connect(const PluginArgs*, char* error, size_t error_size);
// connect returns null and fills `error`, after a first byte with the StatusCode (as
// WritePluginError does); it never throws.
struct PluginArgs {
  const World* world;
  const Options* options;
  // For transports that move data only: carries their control messages. Taken over on success.
  Transport* control;
};

// For dad_plugin_connect: carries a status across the C interface.
inline void WritePluginError(const Status& status, char* error, size_t error_size) {
  std::snprintf(error, error_size, "%c%s", '0' + static_cast<int>(status.code()),
                status.message().c_str());
}
Status ReadPluginError(const char* error);

// Opens libdad_<name>.so in world.plugin_dir and meets the other ranks. "mpi" is
// whichever MPI this process was launched by. A world of size 1 needs no plug-in.
// kUnavailable with the command that brings it when the plug-in or its library is
// not there.
Result<std::unique_ptr<Transport>> ConnectTransport(const std::string& name, const World& world,
                                                    const Options& options);

// Adds NCCL to a transport that moves only host memory, if every rank can use it; asks all ranks.
// Returns an empty text if it was added, or there is no other rank; otherwise the reason, the same
// on all ranks.
Result<std::string> AddDeviceCollectives(std::unique_ptr<Transport>& transport, const World& world,
                                         const Options& options);

// A further C entry point that only some plug-ins have.
Result<void*> FindInPlugin(const std::string& name, const std::string& plugin_dir,
                           const char* symbol);

}  // namespace dad
