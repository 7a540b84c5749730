#include "rendezvous/file_store.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "rendezvous/backoff.h"

namespace dad {
namespace {

constexpr std::chrono::milliseconds kLongestWait{50};

Status Unavailable(const std::string& path, const std::string& reason) {
  return Status::Unavailable("rendezvous file " + path + ": " + reason);
}

// No other process and no other thread writes to this name.
std::string TemporaryBeside(const std::string& path) {
  static std::atomic<uint64_t> counter{0};
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  return path + "." + PercentEncode(host) + "." + std::to_string(getpid()) + "." +
         std::to_string(counter++);
}

}  // namespace

Result<std::unique_ptr<Store>> FileStore::Open(const std::string& directory,
                                               const std::string& scope) {
  const std::string path = directory + "/" + PercentEncode(scope);
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return Unavailable(path, error.message());
  return std::unique_ptr<Store>(new FileStore(path));
}

std::string FileStore::PathOf(const std::string& key) const {
  return directory_ + "/" + PercentEncode(key);
}

Status FileStore::Set(const std::string& key, const std::string& value) {
  const std::string path = PathOf(key);
  const std::string temporary = TemporaryBeside(path);
  std::error_code ignored;  // the write below says what is wrong
  std::filesystem::create_directories(directory_, ignored);
  {
    std::ofstream file(temporary, std::ios::binary);
    file.write(value.data(), static_cast<std::streamsize>(value.size()));
    file.close();
    if (!file) return Unavailable(temporary, "cannot write");
  }
  // A reader sees the whole value or none.
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    unlink(temporary.c_str());
    return Unavailable(path, std::strerror(error));
  }
  return Status::Ok();
}

Result<std::string> FileStore::Get(const std::string& key, std::chrono::milliseconds timeout) {
  const std::string path = PathOf(key);
  Backoff backoff(kLongestWait, Backoff::Clock::now() + timeout);
  do {
    std::ifstream file(path, std::ios::binary);
    if (!file) continue;
    std::string value((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (!file.bad()) return value;
  } while (backoff.Wait());
  return Status::Timeout("rendezvous: key '" + key + "' did not appear in " + directory_);
}

Status FileStore::Delete(const std::string& key) {
  const std::string path = PathOf(key);
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return Unavailable(path, std::strerror(errno));
  }
  // The last one out removes the scope; it fails while there are keys.
  rmdir(directory_.c_str());
  return Status::Ok();
}

}  // namespace dad
