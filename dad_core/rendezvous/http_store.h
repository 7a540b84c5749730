// The key-value server of a launcher (horovodrun's, or dadrun's, which speaks the
// same): plain HTTP/1.0, a key at /<scope>/<key>, values are raw bytes.
#pragma once

#include <string>

#include "rendezvous/store.h"

namespace dad {

struct HttpAddress {
  std::string host;
  std::string port;
};

class HttpStore final : public Store {
 public:
  HttpStore(HttpAddress address, const std::string& scope)
      : address_(std::move(address)), scope_(PercentEncode(scope)) {}

  Status Set(const std::string& key, const std::string& value) override;
  Result<std::string> Get(const std::string& key, std::chrono::milliseconds timeout) override;
  Status Delete(const std::string& key) override;

 private:
  std::string PathOf(const std::string& key) const;
  std::string Where() const { return "http://" + address_.host + ":" + address_.port; }

  const HttpAddress address_;
  const std::string scope_;
};

}  // namespace dad
