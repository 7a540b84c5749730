// Counts refused connections, and names each source once in this process.
#pragma once

#include <cstdint>
#include <string>

namespace dad::tcp {

// "10.0.0.7" of the other end; empty if it is gone.
std::string SourceOf(int fd);

class Strangers {
 public:
  void Refuse(const std::string& source, const std::string& why);
  int64_t count() const { return count_; }

 private:
  int64_t count_ = 0;
};

}  // namespace dad::tcp
