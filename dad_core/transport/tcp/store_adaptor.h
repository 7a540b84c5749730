// Adapts our store to the interface that gloo's rendezvous expects. Remembers its own keys, and
// names the ranks that have not arrived after five seconds, or that it waited for in vain.
#pragma once

#include <gloo/rendezvous/store.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "rendezvous/store.h"

namespace dad::tcp {

class StoreAdaptor final : public ::gloo::rendezvous::Store {
 public:
  StoreAdaptor(dad::Store* store, int rank, int size,
               std::chrono::steady_clock::time_point deadline)
      : store_(store), rank_(rank), size_(size), deadline_(deadline) {}

  void set(const std::string& key, const std::vector<char>& data) override;
  std::vector<char> get(const std::string& key) override;
  void wait(const std::vector<std::string>& keys) override;

  // The error, if the store threw.
  const Status& failure() const { return failure_; }

  // Removes our keys once all ranks have read them.
  void RemoveOwnKeys();

 private:
  [[noreturn]] void Fail(Status failure);
  // Logs the ranks that have not set their variant of `key`. Only the lowest rank that has arrived
  // logs, so that a job prints one line.
  void NameMissingRanks(const std::string& key);

  dad::Store* const store_;
  const int rank_;
  const int size_;
  const std::chrono::steady_clock::time_point deadline_;
  // Reset once the missing ranks have been named.
  std::optional<std::chrono::steady_clock::time_point> name_missing_at_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(5);
  std::vector<std::string> own_keys_;
  Status failure_;
};

}  // namespace dad::tcp
