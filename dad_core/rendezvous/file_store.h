// A directory as a store: a key is a file. For ranks that share a file system.
#pragma once

#include <memory>
#include <string>

#include "rendezvous/store.h"

namespace dad {

class FileStore final : public Store {
 public:
  // Makes DIRECTORY/scope if it is not there.
  static Result<std::unique_ptr<Store>> Open(const std::string& directory,
                                             const std::string& scope);

  Status Set(const std::string& key, const std::string& value) override;
  Result<std::string> Get(const std::string& key, std::chrono::milliseconds timeout) override;
  Status Delete(const std::string& key) override;

 private:
  explicit FileStore(std::string directory) : directory_(std::move(directory)) {}
  std::string PathOf(const std::string& key) const;

  const std::string directory_;
};

}  // namespace dad
