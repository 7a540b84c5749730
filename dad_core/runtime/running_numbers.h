// The numbers of requests without a name (Engine::SubmitUnnamed). Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "dad/engine.h"
#include "util/mutex.h"

namespace dad {

class RunningNumbers {
 public:
  // See Engine::SubmitUnnamed. `engine` is always the same.
  std::shared_ptr<Ticket> Submit(Engine& engine, Request request, std::string* name);

 private:
  Mutex mutex_;
  int64_t num_joins_ GUARDED_BY(mutex_) = 0;
  std::map<std::pair<std::string, int>, int64_t> next_ GUARDED_BY(mutex_);  // by label and set
};

}  // namespace dad
