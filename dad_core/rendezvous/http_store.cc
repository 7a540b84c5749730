#include "rendezvous/http_store.h"

#include <thread>

#include "rendezvous/backoff.h"
#include "rendezvous/http_request.h"

namespace dad {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kAttempts = 3;
constexpr milliseconds kBetweenAttempts{500};
constexpr milliseconds kPerRequest{10'000};
constexpr milliseconds kLongestPoll{100};

// 200 and 404 are answers; all else is tried again.
Result<HttpReply> Ask(const HttpAddress& address, const std::string& verb, const std::string& path,
                      const std::string& body, Clock::time_point deadline) {
  Status last;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (attempt > 0) {
      if (Clock::now() + kBetweenAttempts >= deadline) break;
      std::this_thread::sleep_for(kBetweenAttempts);
    }
    Result<HttpReply> reply = HttpRequest(address.host, address.port, verb, path, body,
                                          std::min(deadline, Clock::now() + kPerRequest));
    if (reply.ok() && (reply.value().status == 200 || reply.value().status == 404)) return reply;
    last = reply.ok() ? Status::Unavailable("HTTP status " + std::to_string(reply.value().status))
                      : reply.status();
  }
  return Status(last.code(), "rendezvous http://" + address.host + ":" + address.port + ": " +
                                 verb + " " + path + ": " + last.message());
}

Clock::time_point NoDeadline() {
  return Clock::now() + kAttempts * (kPerRequest + kBetweenAttempts);
}

}  // namespace

std::string HttpStore::PathOf(const std::string& key) const {
  return "/" + scope_ + "/" + PercentEncode(key);
}

Status HttpStore::Set(const std::string& key, const std::string& value) {
  Result<HttpReply> reply = Ask(address_, "PUT", PathOf(key), value, NoDeadline());
  if (reply.ok() && reply.value().status != 200) {
    return Status::Unavailable("rendezvous " + Where() + ": PUT " + PathOf(key) + " was refused");
  }
  return reply.status();
}

Result<std::string> HttpStore::Get(const std::string& key, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  Backoff backoff(kLongestPoll, deadline);
  do {
    Result<HttpReply> reply = Ask(address_, "GET", PathOf(key), "", deadline);
    if (!reply.ok() && reply.status().code() != StatusCode::kTimeout) return reply.status();
    if (reply.ok() && reply.value().status == 200) return std::move(reply.value().body);
  } while (backoff.Wait());
  return Status::Timeout("rendezvous: key '" + key + "' did not appear at " + Where() + "/" +
                         scope_);
}

Status HttpStore::Delete(const std::string& key) {
  return Ask(address_, "DELETE", PathOf(key), "", NoDeadline()).status();
}

}  // namespace dad
