// Opens a library that may not be there, and takes functions from it by name.
#pragma once

#include <string>
#include <vector>

#include "dad/export.h"
#include "dad/status.h"

namespace dad {

struct LibrarySearch {
  std::string what;                // "the CUDA runtime"
  std::string path;                // if not empty, only this file is tried
  std::vector<std::string> names;  // else these, first among what the process has loaded
  std::string remedy;              // the command that brings it
};

// Stays open until the process ends: its code may run as long as that.
class DAD_EXPORT SharedLibrary {
 public:
  // kUnavailable with the reason and the remedy.
  static Result<SharedLibrary> Open(const LibrarySearch& search);

  // Fills *function; kUnavailable if the library has no such symbol.
  template <typename Function>
  Status Find(const char* symbol, Function* function) const {
    Result<void*> found = Find(symbol);
    if (!found.ok()) return found.status();
    *function = reinterpret_cast<Function>(found.value());
    return Status::Ok();
  }

  const std::string& name() const { return name_; }

 private:
  SharedLibrary(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}
  Result<void*> Find(const char* symbol) const;

  void* handle_;
  std::string name_;
};

}  // namespace dad
