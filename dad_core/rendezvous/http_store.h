// The key-value server of a launcher (horovodrun's, or dadrun's, which speaks the
// same): plain HTTP/1.0, a key at /<scope>/<key>, values are raw bytes.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "rendezvous/http_request.h"
#include "rendezvous/store.h"

namespace dad {

struct HttpAddress {
  std::string host;
  std::string port;
};

// With a key every request is signed by it, and so must every reply be: python/dad/runner/secret.py
// has the texts that are signed. A request names its client and counts that client's requests, and
// it names the server, which tells its name to who has the key: what was recorded cannot be sent
// again. For one thread.
class HttpStore final : public Store {
 public:
  HttpStore(HttpAddress address, const std::string& scope, std::string key);

  Status Set(const std::string& key, const std::string& value) override;
  Result<std::string> Get(const std::string& key, std::chrono::milliseconds timeout) override;
  Status Delete(const std::string& key) override;
  Status CheckRound() override;

 private:
  using Clock = std::chrono::steady_clock;

  // 200 and 404 are answers; all else is tried again, but for a refusal.
  Result<HttpReply> Ask(const std::string& verb, const std::string& key, const std::string& body,
                        Clock::time_point deadline);
  Result<HttpReply> AskOnce(const std::string& verb, const std::string& path,
                            const std::string& body, Clock::time_point deadline);
  std::string PathOf(const std::string& key) const;
  std::string Where() const { return "http://" + address_.host + ":" + address_.port; }

  const HttpAddress address_;
  const std::string scope_;
  const std::string key_;
  const std::string client_;
  uint64_t num_requests_ = 0;
  std::string server_ = "-";  // until it has told its name
};

}  // namespace dad
