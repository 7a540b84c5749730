// Counts connections that were refused, and names each source once.
#pragma once

#include <cstdint>
#include <set>
#include <string>

namespace dad::tcp {

// "10.0.0.7" of the other end; empty if it is gone.
std::string SourceOf(int fd);

class Strangers {
 public:
  // Logs the first of each source.
  void Refuse(const std::string& source, const std::string& why);
  int64_t count() const { return count_; }

 private:
  int64_t count_ = 0;
  std::set<std::string> named_;  // of bounded size
};

}  // namespace dad::tcp
