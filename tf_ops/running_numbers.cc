#include "running_numbers.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace dad_tensorflow {
namespace {

struct Numbers {
  std::mutex mutex;
  std::weak_ptr<dad::Engine> engine;
  std::map<std::pair<dad::OpKind, int>, int64_t> next;
};

Numbers& TheNumbers() {
  static auto* numbers = new Numbers;
  return *numbers;
}

}  // namespace

std::shared_ptr<dad::Ticket> SubmitNumbered(const std::shared_ptr<dad::Engine>& engine,
                                            dad::Request request) {
  Numbers& numbers = TheNumbers();
  std::lock_guard lock(numbers.mutex);
  if (numbers.engine.lock() != engine) {
    numbers.engine = engine;
    numbers.next.clear();
  }
  int64_t& number = numbers.next[{request.kind, request.process_set}];
  request.name = std::string("tf.") + dad::Name(request.kind) + ".noname." + std::to_string(number);
  request.recurring = false;
  std::shared_ptr<dad::Ticket> ticket = engine->Submit(std::move(request));
  const bool refused = ticket->Done() && ticket->Wait().code() == dad::StatusCode::kInvalidArgument;
  if (!refused) ++number;
  return ticket;
}

void RestartNumbers() {
  Numbers& numbers = TheNumbers();
  std::lock_guard lock(numbers.mutex);
  numbers.next.clear();
}

}  // namespace dad_tensorflow
