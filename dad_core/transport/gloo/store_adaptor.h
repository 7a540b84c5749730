// Our store as gloo's rendezvous asks for it. Remembers its keys, and says which rank
// it waited for in vain.
#pragma once

#include <gloo/rendezvous/store.h>

#include <chrono>
#include <string>
#include <vector>

#include "rendezvous/store.h"

namespace dad::gloo_transport {

class StoreAdaptor final : public ::gloo::rendezvous::Store {
 public:
  StoreAdaptor(dad::Store* store, std::chrono::steady_clock::time_point deadline)
      : store_(store), deadline_(deadline) {}

  void set(const std::string& key, const std::vector<char>& data) override;
  std::vector<char> get(const std::string& key) override;
  void wait(const std::vector<std::string>& keys) override;

  // What went wrong, if the store threw.
  const Status& failure() const { return failure_; }

  // Takes our keys out again once everyone has read them.
  void RemoveOwnKeys();

 private:
  [[noreturn]] void Fail(Status failure);

  dad::Store* const store_;
  const std::chrono::steady_clock::time_point deadline_;
  std::vector<std::string> own_keys_;
  Status failure_;
};

}  // namespace dad::gloo_transport
