// What a hierarchy knows of its requests: which are on their way, and which names have met before.
// Any thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dad/hierarchy.h"
#include "dad/ticket.h"

namespace dad {

// Requests that are on their way.
class Hierarchy::OpenClimbs {
 public:
  void Add(const std::shared_ptr<Ticket>& climb) {
    const std::lock_guard lock(mutex_);
    open_.emplace(climb.get(), climb);
  }
  void Remove(const Ticket* climb) {
    std::function<void()> then;
    {
      const std::lock_guard lock(mutex_);
      open_.erase(climb);
      if (!open_.empty()) return;
      then = std::exchange(then_, nullptr);
    }
    if (then) then();
  }
  void WhenNone(std::function<void()> then) {
    std::vector<std::shared_ptr<Ticket>> open;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [at, climb] : open_) {
        if (auto alive = climb.lock()) open.push_back(std::move(alive));
      }
      if (!open.empty()) then_ = std::move(then);
    }
    if (open.empty()) return then();
    // Nothing else is coming that they could wait for.
    for (const auto& climb : open) climb->UserWaits();
  }

 private:
  mutable std::mutex mutex_;
  std::map<const Ticket*, std::weak_ptr<Ticket>> open_;
  std::function<void()> then_;
};

// Names that all ranks know to go from host to host. Names only: other differences are noticed
// inside a host, where a rank that met all others again would be waited for.
class Hierarchy::AgreedNames {
 public:
  bool Has(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    return names_.contains(name);
  }
  void Add(const std::string& name) {
    const std::lock_guard lock(mutex_);
    names_.insert(name);
  }
  void Clear() {
    const std::lock_guard lock(mutex_);
    names_.clear();
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::string> names_;
};

}  // namespace dad
