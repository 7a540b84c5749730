// The numbers of requests without a name (Engine::SubmitUnnamed). Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "dad/engine.h"

namespace dad {

class RunningNumbers {
 public:
  // See Engine::SubmitUnnamed. `engine` is always the same.
  std::shared_ptr<Ticket> Submit(Engine& engine, Request request, std::string* name);

 private:
  std::mutex mutex_;
  int64_t num_joins_ = 0;                                // guarded by mutex_
  std::map<std::pair<std::string, int>, int64_t> next_;  // by label and process set; guarded
};

}  // namespace dad
