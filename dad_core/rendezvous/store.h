// A key-value store through which ranks find each other at start-up.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "dad/export.h"
#include "dad/status.h"

namespace dad {

class Store {
 public:
  virtual ~Store() = default;
  virtual Status Set(const std::string& key, const std::string& value) = 0;
  // Waits for the key; kTimeout names it.
  virtual Result<std::string> Get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  virtual Status Delete(const std::string& key) = 0;
  // kAborted if the launcher says that ranks which are not there yet will not come: the round of an
  // elastic job is over. An OK does not say that they will.
  virtual Status CheckRound() { return Status::Ok(); }
};

// `text` with every byte that is not a letter, a digit, '-' or '_' as %XX: one part
// of a URL path, and one name in a directory that is not "." or "..".
std::string PercentEncode(const std::string& text);

// url: "http://ADDR:PORT" (a key lives at /<scope>/<key>, as horovodrun serves it)
// or "file:///DIR". `scope` keeps one job and one init() apart from the next. `key` signs what is
// said over HTTP; empty: the server knows no secret. A directory is as safe as its permissions.
DAD_EXPORT Result<std::unique_ptr<Store>> OpenStore(const std::string& url,
                                                    const std::string& scope,
                                                    const std::string& key = "");

}  // namespace dad
