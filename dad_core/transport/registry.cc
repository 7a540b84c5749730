#include "transport/registry.h"

#include <dlfcn.h>
#include <unistd.h>

#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/local/local_network.h"
#include "transport/plugin_abi.h"

namespace dad {
namespace {

struct Backend {
  std::string_view name;
  std::string_view library;
  std::string_view remedy;                    // the command that installs what it needs
  std::vector<std::string_view> launched_by;  // prefixes of a launcher's variables
};

const std::vector<Backend>& Backends() {
  static const std::vector<Backend> backends = {
      {"gloo", "libdad_gloo.so", "apt install libgloo-dev", {}},
      {"mpi", "libdad_mpi_openmpi.so", "apt install libopenmpi-dev", {"OMPI_COMM_WORLD_"}},
      {"mpi", "libdad_mpi_mpich.so", "apt install libmpich-dev", {"PMI_", "PMIX_", "HYDRA_"}},
      {"nccl", "libdad_nccl.so", "pip install nvidia-nccl-cu13", {}},
  };
  return backends;
}

bool EnvironmentHas(std::string_view beginning) {
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::string_view(*entry).starts_with(beginning)) return true;
  }
  return false;
}

bool LaunchedBy(const Backend& backend) {
  for (const std::string_view beginning : backend.launched_by) {
    if (EnvironmentHas(beginning)) return true;
  }
  return false;
}

// The candidates with one name: the one whose launcher started us (Open MPI sets PMIX_ as well, so
// the first in the list); otherwise all, to be tried in order.
std::vector<const Backend*> Candidates(const std::string& name) {
  std::vector<const Backend*> candidates;
  for (const Backend& backend : Backends()) {
    if (backend.name != name) continue;
    if (LaunchedBy(backend)) return {&backend};
    candidates.push_back(&backend);
  }
  return candidates;
}

struct Plugin {
  void* library = nullptr;
  const char* (*abi)() = nullptr;
  const char* (*describe)() = nullptr;
  Transport* (*connect)(const PluginArgs*, char*, size_t) = nullptr;
};

// Plug-ins stay open, because their code may run as long as the process does.
Result<Plugin> OpenOne(const Backend& backend, const std::string& plugin_dir) {
  const std::string file(backend.library);
  const std::string path = plugin_dir.empty() ? file : plugin_dir + "/" + file;
  // One at a time, so that any thread that finds a plug-in open sees what its libraries set up when
  // they were loaded. (The loader has its own lock, which the thread sanitizer does not know.)
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  // Local: its libraries must not provide symbols to other code, because libtorch has a gloo too.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const std::string why = dlerror();
    const bool built = access(path.c_str(), F_OK) == 0;  // then only its library is missing
    return Status::Unavailable(file + ": " + why + " (to get it: " + std::string(backend.remedy) +
                               (built ? ")" : ", then make build or reinstall dad)"));
  }
  Plugin plugin;
  plugin.library = library;
  plugin.abi = reinterpret_cast<decltype(plugin.abi)>(dlsym(library, "dad_plugin_abi"));
  plugin.describe =
      reinterpret_cast<decltype(plugin.describe)>(dlsym(library, "dad_plugin_describe"));
  plugin.connect = reinterpret_cast<decltype(plugin.connect)>(dlsym(library, "dad_plugin_connect"));
  if (plugin.abi == nullptr || plugin.describe == nullptr || plugin.connect == nullptr) {
    return Status::Unavailable(path + " is not a plug-in of dad");
  }
  if (const std::string core = MakePluginAbi(); core != plugin.abi()) {
    return Status::Unavailable(path + " was built for another core (" + plugin.abi() + ", not " +
                               core + "); reinstall dad");
  }
  return plugin;
}

Result<Plugin> Open(const std::string& name, const std::string& plugin_dir) {
  const std::vector<const Backend*> candidates = Candidates(name);
  if (candidates.empty()) {
    return Status::InvalidArgument("no transport '" + name + "'; there are gloo and mpi");
  }
  std::string reasons;
  for (const Backend* backend : candidates) {
    Result<Plugin> plugin = OpenOne(*backend, plugin_dir);
    if (plugin.ok()) return plugin;
    reasons += (reasons.empty() ? "" : "; ") + plugin.status().message();
  }
  return Status::Unavailable(reasons);
}

}  // namespace

Status ReadPluginError(const char* error) {
  const int code = error[0] - '0';
  if (code <= 0 || code > static_cast<int>(StatusCode::kInternal)) {
    return Status::Internal(error);
  }
  return Status(static_cast<StatusCode>(code), error + 1);
}

Result<std::unique_ptr<Transport>> ConnectTransport(const std::string& name, const World& world,
                                                    const Options& options) {
  if (world.size == 1) return LocalNetwork(1).Connect(0);
  if (world.rank < 0 || world.rank >= world.size) {
    return Status::InvalidArgument("rank " + std::to_string(world.rank) + " of " +
                                   std::to_string(world.size));
  }
  Result<Plugin> plugin = Open(name, world.plugin_dir);
  if (!plugin.ok()) return plugin.status();

  // MPI moves data only: its calls cannot be cancelled when a peer dies.
  std::unique_ptr<Transport> control;
  if (name != "gloo") {
    Result<std::unique_ptr<Transport>> gloo = ConnectTransport("gloo", world, options);
    if (!gloo.ok()) return gloo.status();
    control = std::move(gloo).value();
  }
  const PluginArgs args{&world, &options, control.get()};
  char error[2048] = "";
  std::unique_ptr<Transport> transport(plugin.value().connect(&args, error, sizeof error));
  if (transport == nullptr) return ReadPluginError(error);
  (void)control.release();  // it belongs to the new transport now
  return transport;
}

Result<std::string> AddDeviceCollectives(std::unique_ptr<Transport>& transport, const World& world,
                                         const Options& options) {
  if (transport->size() == 1 || transport->device_collectives() != nullptr) return std::string();
  const Result<void*> usable = FindInPlugin("nccl", world.plugin_dir, "dad_plugin_usable");
  std::string mine = usable.status().message();
  if (usable.ok()) mine = reinterpret_cast<const char* (*)(int)>(usable.value())(world.local_rank);
  const auto blobs = transport->AllGatherBlobs(
      std::as_bytes(std::span(mine)),
      std::chrono::milliseconds(static_cast<int64_t>(options.start_timeout_seconds * 1000)));
  if (!blobs.ok()) return blobs.status();
  for (size_t rank = 0; rank < blobs.value().size(); ++rank) {
    const std::vector<std::byte>& blob = blobs.value()[rank];
    if (blob.empty()) continue;
    return "rank " + std::to_string(rank) + ": " +
           std::string(reinterpret_cast<const char*>(blob.data()), blob.size());
  }
  Result<Plugin> plugin = Open("nccl", world.plugin_dir);
  if (!plugin.ok()) return plugin.status();
  const PluginArgs args{&world, &options, transport.get()};
  char error[2048] = "";
  std::unique_ptr<Transport> both(plugin.value().connect(&args, error, sizeof error));
  if (both == nullptr) return ReadPluginError(error);
  (void)transport.release();  // it belongs to the new transport now
  transport = std::move(both);
  return std::string();
}

Result<void*> FindInPlugin(const std::string& name, const std::string& plugin_dir,
                           const char* symbol) {
  Result<Plugin> plugin = Open(name, plugin_dir);
  if (!plugin.ok()) return plugin.status();
  void* found = dlsym(plugin.value().library, symbol);
  if (found == nullptr) {
    return Status::Unavailable("the plug-in of " + name + " has no " + symbol);
  }
  return found;
}

Status PluginAvailable(const std::string& name, const std::string& plugin_dir) {
  return Open(name, plugin_dir).status();
}

Result<std::string> DescribePlugin(const std::string& name, const std::string& plugin_dir) {
  Result<Plugin> plugin = Open(name, plugin_dir);
  if (!plugin.ok()) return plugin.status();
  return std::string(plugin.value().describe());
}

}  // namespace dad
