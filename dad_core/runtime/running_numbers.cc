#include "runtime/running_numbers.h"

namespace dad {

std::shared_ptr<Ticket> RunningNumbers::Submit(Engine& engine, Request request, std::string* name) {
  // Held while submitting, so calls from several threads are numbered in the order they are made.
  MutexLock lock(mutex_);
  if (const int64_t joins = engine.num_joins(); joins != num_joins_) {
    num_joins_ = joins;
    next_.clear();
  }
  int64_t& number = next_[{request.name, request.process_set}];
  request.name += ".noname." + std::to_string(number);
  request.recurring = false;
  if (name != nullptr) *name = request.name;
  std::shared_ptr<Ticket> ticket = engine.Submit(std::move(request));
  if (!ticket->Rejected()) ++number;
  return ticket;
}

}  // namespace dad
