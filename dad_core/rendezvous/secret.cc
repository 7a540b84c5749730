// The secret of a job for programs without Python; python/dad/runner/secret.py has the same rules.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "dad/engine.h"
#include "util/sha256.h"

namespace dad {
namespace {

constexpr size_t kFewestBytes = 16;
constexpr size_t kMostBytes = 4096;
// Before the secret, in the memory that child.py keeps.
constexpr std::string_view kMark = "dad secret 1\n";
constexpr std::string_view kSpace = " \t\n\v\f\r";

struct Content {
  std::string bytes;  // at most one more than a secret may have
  mode_t mode = 0;
};

// A regular file; empty if it cannot be read.
Content ReadFile(const std::string& path) {
  Content content;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return content;
  struct stat about {};
  if (fstat(fd, &about) == 0 && S_ISREG(about.st_mode)) {
    content.mode = about.st_mode;
    content.bytes.resize(kMark.size() + kMostBytes + 1);
    const ssize_t got = read(fd, content.bytes.data(), content.bytes.size());
    content.bytes.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  }
  close(fd);
  return content;
}

bool IsNumber(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
}

// `place` is PROCESS:DESCRIPTOR. Inherited; or that of the parent, where a process between has
// closed what it had inherited.
std::string ReadPlace(const std::string& place) {
  const size_t colon = place.find(':');
  if (colon == place.npos) return "";
  const std::string process = place.substr(0, colon);
  const std::string descriptor = place.substr(colon + 1);
  if (!IsNumber(process) || !IsNumber(descriptor)) return "";
  for (const std::string& owner : {std::string("self"), process}) {
    const std::string bytes = ReadFile("/proc/" + owner + "/fd/" + descriptor).bytes;
    if (bytes.starts_with(kMark)) return bytes.substr(kMark.size());
  }
  return "";
}

Result<std::string> ReadSecretFile(const std::string& path) {
  const std::string where = "DAD_SECRET_FILE=" + path;
  Content content = ReadFile(path);
  if (content.mode == 0) return Status::InvalidArgument(where + " cannot be read");
  if ((content.mode & (S_IROTH | S_IWOTH | S_IWGRP)) != 0) {
    return Status::InvalidArgument(where + ": others may read or change it: chmod 600 " + path);
  }
  std::string& bytes = content.bytes;
  bytes.erase(bytes.find_last_not_of(kSpace) + 1);
  bytes.erase(0, std::min(bytes.find_first_not_of(kSpace), bytes.size()));
  if (bytes.size() < kFewestBytes || bytes.size() > kMostBytes) {
    return Status::InvalidArgument(where + " has " + std::to_string(bytes.size()) + " bytes, not " +
                                   std::to_string(kFewestBytes) + " to " +
                                   std::to_string(kMostBytes));
  }
  return bytes;
}

}  // namespace

Status TakeSecret(World* world, const Options::Getenv& getenv) {
  const auto setting = [&getenv](const char* name) {
    const char* value = getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  const std::string place = setting("DAD_SECRET_FD");
  const std::string path = setting("DAD_SECRET_FILE");
  world->job = setting("DAD_JOB_ID");
  if (world->size == 1) return Status::Ok();
  if (!place.empty()) world->secret = ReadPlace(place);
  if (world->secret.empty() && !path.empty()) {
    Result<std::string> secret = ReadSecretFile(path);
    if (!secret.ok()) return secret.status();
    world->secret = std::move(secret).value();
  } else if (world->secret.empty() && !place.empty()) {
    return Status::InvalidArgument("the secret of this job is not where dadrun has left it (" +
                                   place + "); DAD_SECRET_FILE may name a file with it");
  }
  if (!world->secret.empty()) {
    world->store_key = HmacSha256(world->secret, "dad store " + world->job);
  }
  return Status::Ok();
}

}  // namespace dad
