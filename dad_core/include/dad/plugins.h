// What can be asked about transport plug-ins before there is an engine.
#pragma once

#include <string>

#include "dad/export.h"
#include "dad/status.h"

namespace dad {

// OK, or why not: "libdad_mpi_openmpi.so: libmpi.so.40: cannot open ...".
DAD_EXPORT Status PluginAvailable(const std::string& name, const std::string& plugin_dir);

// What an available plug-in says of itself.
DAD_EXPORT Result<std::string> DescribePlugin(const std::string& name,
                                              const std::string& plugin_dir);

// Under mpirun, where ranks have no rendezvous server: initialises MPI and gives
// every rank the text of rank 0.
DAD_EXPORT Result<std::string> MpiBootstrap(const std::string& mine, const std::string& plugin_dir);

}  // namespace dad
