#include "device/shared_library.h"

#include <dlfcn.h>

namespace dad {

Result<SharedLibrary> SharedLibrary::Open(const LibrarySearch& search) {
  if (!search.path.empty()) {
    if (void* handle = dlopen(search.path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return SharedLibrary(handle, search.path);
    }
    return Status::Unavailable(search.what + " is not there: " + dlerror());
  }
  // Two copies of such a library in one process do not know each other's streams and threads: the
  // one that a framework has loaded goes first.
  for (const std::string& name : search.names) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) {
      return SharedLibrary(handle, name);
    }
  }
  std::string reason;
  for (const std::string& name : search.names) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return SharedLibrary(handle, name);
    }
    if (reason.empty()) reason = dlerror();
  }
  return Status::Unavailable(search.what + " is not there: " + reason +
                             " (to get it: " + search.remedy + ")");
}

Result<void*> SharedLibrary::Find(const char* symbol) const {
  if (void* found = dlsym(handle_, symbol)) return found;
  return Status::Unavailable(name_ + " has no function " + symbol + ": it is too old");
}

}  // namespace dad
