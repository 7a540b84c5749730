// The state that exchanges keep between steps, by tensor. It outlives the exchanges: these
// are made anew when ranks change what they fuse, or when a tensor goes dense for a while.
//
// Exchanges use it on the worker thread, in a step. The other calls are for a user's thread
// while no request of that tensor is in flight; the lock covers the table, not the states.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "dad/state.h"
#include "dad/status.h"
#include "util/mutex.h"

namespace dad {

class ExchangeState {
 public:
  virtual ~ExchangeState() = default;

  // Appends copies; what is still to be applied has been.
  virtual void Export(std::vector<StateTensor>& out) = 0;
  // InvalidArgument if the tensors are not those of such a state.
  virtual Status Import(const std::vector<StateTensor>& tensors) = 0;
  // The mean of the last step was not used: it goes back into the residuals.
  virtual void ReturnLast() = 0;
};

struct StateKey {
  int process_set = 0;
  uint32_t stream = 0;
  std::string name;
  auto operator<=>(const StateKey&) const = default;
};

class StateStore {
 public:
  // The state of that name and kind, made by `make` if there is none. A state of another
  // kind (the method has changed) is dropped.
  template <typename State, typename Make>
  Result<std::shared_ptr<State>> Get(const StateKey& key, const Make& make) {
    MutexLock lock(mutex_);
    Entry& entry = entries_[key];
    if (auto state = std::dynamic_pointer_cast<State>(entry.state)) return state;
    std::shared_ptr<State> state = make();
    if (!entry.imported.empty()) {
      const Status status = state->Import(entry.imported);
      // Where a device lacks memory for it the next step may find some.
      if (status.code() == StatusCode::kUnavailable) return status;
      entry.imported.clear();
      if (!status.ok()) return status;
    }
    entry.state = state;
    return state;
  }

  // A method that goes on in another place, host or device, takes over what it had in `From`, as
  // from a checkpoint. Other states are left alone.
  template <typename From>
  void Move(const StateKey& key) {
    {
      MutexLock lock(mutex_);
      const auto found = entries_.find(key);
      if (found == entries_.end() || dynamic_cast<From*>(found->second.state.get()) == nullptr) {
        return;
      }
    }
    Import(key, Export(key));
  }

  std::vector<StateTensor> Export(const StateKey& key) const;
  // Taken over when the exchange of that tensor begins its next step.
  void Import(const StateKey& key, std::vector<StateTensor> tensors);
  // All states of a stream.
  void ReturnLast(int process_set, uint32_t stream);
  void Drop(int process_set, uint32_t stream);

 private:
  struct Entry {
    std::shared_ptr<ExchangeState> state;
    std::vector<StateTensor> imported;
  };
  mutable Mutex mutex_;
  std::map<StateKey, Entry> entries_ GUARDED_BY(mutex_);
};

}  // namespace dad
