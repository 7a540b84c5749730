// One HTTP/1.0 request on a connection of its own.
#pragma once

#include <chrono>
#include <string>

#include "dad/status.h"

namespace dad {

struct HttpReply {
  int status = 0;  // 200, 404, …
  std::string body;
  std::string proof;  // the value of X-Dad-Auth, if there is one
};

// A whole reply; Unavailable if it is none, or cut short.
Result<HttpReply> ParseHttpReply(const std::string& bytes);

// The longest reply that is read.
inline constexpr size_t kMostReplyBytes = size_t{1} << 30;

// Blocks until the reply is complete or `deadline` has passed. `proof` becomes X-Dad-Auth; empty:
// there is no such header.
Result<HttpReply> HttpRequest(const std::string& host, const std::string& port,
                              const std::string& verb, const std::string& path,
                              const std::string& body, const std::string& proof,
                              std::chrono::steady_clock::time_point deadline);

}  // namespace dad
