// Finds a transport by name. The only place that lists backends.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dad/engine.h"
#include "dad/status.h"
#include "transport/transport.h"

namespace dad {

// What a plug-in exports, with C linkage, under these names:
//   const char* dad_plugin_abi();     must equal PluginAbi() of the core
//   const char* dad_plugin_describe();   one line for --check-build
//   Transport* dad_plugin_connect(const PluginArgs*, char* error, size_t error_size);
// connect returns null and fills `error` on failure; it never throws.
struct PluginArgs {
  const World* world;
  const Options* options;
  // For transports that move data only: carries their control messages. Taken
  // over on success.
  Transport* control;
};

const char* PluginAbi();

// Opens libdad_<name>.so in world.plugin_dir and meets the other ranks.
// kUnavailable with the command that brings it when the plug-in or its library is
// not there.
Result<std::unique_ptr<Transport>> ConnectTransport(const std::string& name, const World& world,
                                                    const Options& options);

// True, or why not: "libdad_mpi_openmpi.so: libmpi.so.40: cannot open ...".
Status PluginAvailable(const std::string& name, const std::string& plugin_dir);

}  // namespace dad
