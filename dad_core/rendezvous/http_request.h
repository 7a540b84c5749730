// One HTTP/1.0 request on a connection of its own.
#pragma once

#include <chrono>
#include <string>

#include "dad/status.h"

namespace dad {

struct HttpReply {
  int status = 0;  // 200, 404, …
  std::string body;
};

// A whole reply; Unavailable if it is none, or cut short.
Result<HttpReply> ParseHttpReply(const std::string& bytes);

// Blocks until the reply is complete or `deadline` has passed.
Result<HttpReply> HttpRequest(const std::string& host, const std::string& port,
                              const std::string& verb, const std::string& path,
                              const std::string& body,
                              std::chrono::steady_clock::time_point deadline);

}  // namespace dad
