#include "rendezvous/http_store.h"

#include <algorithm>
#include <thread>

#include "rendezvous/backoff.h"
#include "rendezvous/http_request.h"
#include "util/sha256.h"

namespace dad {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kAttempts = 3;
constexpr milliseconds kBetweenAttempts{500};
constexpr milliseconds kPerRequest{10'000};
constexpr milliseconds kLongestPoll{100};
// Whoever does not want to wait for a key still has to wait for the answer.
constexpr milliseconds kShortestRequest{2'000};
constexpr int kGone = 410;
constexpr int kUnauthorized = 401;
constexpr int kForbidden = 403;

Clock::time_point NoDeadline() {
  return Clock::now() + kAttempts * (kPerRequest + kBetweenAttempts);
}

}  // namespace

HttpStore::HttpStore(HttpAddress address, const std::string& scope, std::string key)
    : address_(std::move(address)),
      scope_(PercentEncode(scope)),
      key_(std::move(key)),
      client_(HexOf(RandomBytes(16))) {}

Result<HttpReply> HttpStore::AskOnce(const std::string& verb, const std::string& path,
                                     const std::string& body, Clock::time_point deadline) {
  if (key_.empty())
    return HttpRequest(address_.host, address_.port, verb, path, body, "", deadline);
  for (int attempt = 0;; ++attempt) {
    const std::string place = client_ + " " + std::to_string(++num_requests_) + " " + server_;
    const std::string digest = HexOf(Sha256(body));
    const std::string signature =
        HexOf(HmacSha256(key_, "dad store request 1\n" + verb + " " + path + "\n" + place + "\n" +
                                   std::to_string(body.size()) + " " + digest + "\n"));
    Result<HttpReply> reply = HttpRequest(address_.host, address_.port, verb, path, body,
                                          "1 " + place + " " + digest + " " + signature, deadline);
    if (!reply.ok()) return reply;
    const HttpReply& answer = reply.value();
    if (answer.status == kForbidden) {
      return Status::InvalidArgument(
          "the server does not know this job's secret: is DAD_SECRET_FILE the same on all hosts?");
    }
    const std::string expected = HexOf(HmacSha256(
        key_, "dad store reply 1\n" + signature + "\n" + std::to_string(answer.status) + " " +
                  std::to_string(answer.body.size()) + " " + HexOf(Sha256(answer.body)) + "\n"));
    if (!SameBytes(answer.proof, expected)) {
      return Status::InvalidArgument("the answer is not signed with the secret of this job");
    }
    if (answer.status != kUnauthorized || attempt > 0) return reply;
    server_ = answer.body;
  }
}

Result<HttpReply> HttpStore::Ask(const std::string& verb, const std::string& key,
                                 const std::string& body, Clock::time_point deadline) {
  const std::string path = PathOf(key);
  Status last;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (attempt > 0) {
      if (Clock::now() + kBetweenAttempts >= deadline) break;
      std::this_thread::sleep_for(kBetweenAttempts);
    }
    Result<HttpReply> reply =
        AskOnce(verb, path, body, std::min(deadline, Clock::now() + kPerRequest));
    if (reply.ok() && (reply.value().status == 200 || reply.value().status == 404)) return reply;
    if (reply.ok() && reply.value().status == kGone) {
      return Status::Aborted("this round of the job is over, since a rank was lost or left");
    }
    last = reply.ok() ? Status::Unavailable("HTTP status " + std::to_string(reply.value().status))
                      : reply.status();
    if (last.code() == StatusCode::kInvalidArgument) break;
  }
  return Status(last.code(),
                "rendezvous " + Where() + ": " + verb + " " + path + ": " + last.message());
}

std::string HttpStore::PathOf(const std::string& key) const {
  return "/" + scope_ + "/" + PercentEncode(key);
}

Status HttpStore::Set(const std::string& key, const std::string& value) {
  Result<HttpReply> reply = Ask("PUT", key, value, NoDeadline());
  if (reply.ok() && reply.value().status != 200) {
    return Status::Unavailable("rendezvous " + Where() + ": PUT " + PathOf(key) + " was refused");
  }
  return reply.status();
}

Result<std::string> HttpStore::Get(const std::string& key, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  Backoff backoff(kLongestPoll, deadline);
  do {
    const auto answer_by = std::max(deadline, Clock::now() + kShortestRequest);
    Result<HttpReply> reply = Ask("GET", key, "", answer_by);
    if (!reply.ok() && reply.status().code() != StatusCode::kTimeout) return reply.status();
    if (reply.ok() && reply.value().status == 200) return std::move(reply.value().body);
  } while (backoff.Wait());
  return Status::Timeout("rendezvous: key '" + key + "' did not appear at " + Where() + "/" +
                         scope_);
}

Status HttpStore::Delete(const std::string& key) {
  return Ask("DELETE", key, "", NoDeadline()).status();
}

// dadrun's server says kGone of any key that is not there when a round has been abandoned.
Status HttpStore::CheckRound() {
  Result<HttpReply> reply = Ask("GET", "is_over", "", Clock::now() + kShortestRequest);
  if (reply.ok() || reply.status().code() != StatusCode::kAborted) return Status::Ok();
  return reply.status();
}

}  // namespace dad
