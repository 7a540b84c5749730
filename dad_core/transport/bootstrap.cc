// Under mpirun, MPI itself tells the ranks where to meet.
#include <vector>

#include "dad/plugins.h"
#include "transport/registry.h"

namespace dad {
namespace {

constexpr size_t kLongestText = 64 * 1024;

}  // namespace

Result<std::string> MpiBootstrap(const std::string& mine, const std::string& plugin_dir) {
  Result<void*> entry = FindInPlugin("mpi", plugin_dir, "dad_plugin_bootstrap");
  if (!entry.ok()) return entry.status();
  const auto bootstrap = reinterpret_cast<bool (*)(const char*, char*, size_t)>(entry.value());
  std::vector<char> out(kLongestText);
  if (!bootstrap(mine.c_str(), out.data(), out.size())) return ReadPluginError(out.data());
  return std::string(out.data());
}

}  // namespace dad
