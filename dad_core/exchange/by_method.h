// What exchanges that go by a method have in common: the type they work in, what they refuse, and
// how they come to their state.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "dad/status.h"
#include "exchange/exchange.h"
#include "exchange/feedback/state_store.h"

namespace dad {

// They work in double for a float64 tensor and in float for every other.
template <typename T>
constexpr DType DTypeOf() {
  return sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
}

inline Status WrongMethod(const TensorSpec& spec, const std::string& what) {
  return Status::InvalidArgument("\"" + spec.name + "\": method \"" + spec.method.text() +
                                 "\": " + what);
}

// Ok for a sum or an average of a floating type; `subject` is what the method sends.
inline Status CheckSummable(const TensorSpec& spec, const std::string& subject) {
  if (!IsFloating(spec.dtype)) return WrongMethod(spec, "the type is not floating");
  if (spec.op == ReduceOp::kSum || spec.op == ReduceOp::kAverage) return Status::Ok();
  return WrongMethod(spec, subject + " can be summed and averaged, op is " + Name(spec.op));
}

// The state of that tensor; a new one in a set of one rank, where nothing is kept.
template <typename State, typename Make>
Result<std::shared_ptr<State>> StateOf(const TensorSpec& spec, const ExchangeEnv& env,
                                       const Make& make) {
  if (env.states == nullptr) return std::shared_ptr<State>(make());
  auto found = env.states->Get<State>({env.process_set, spec.stream, spec.name}, make);
  if (found.ok() || found.status().code() == StatusCode::kUnavailable) return found;
  return Status::InvalidArgument("\"" + spec.name + "\": " + found.status().message());
}

// Between host and device: the state that the method has as a `From`, if there is one, will be that
// of the next StateOf.
template <typename From>
void MoveState(const TensorSpec& spec, const ExchangeEnv& env) {
  if (env.states != nullptr) env.states->Move<From>({env.process_set, spec.stream, spec.name});
}

template <template <typename> class Kind, typename... Args>
std::unique_ptr<Exchange> MakeForType(const TensorSpec& spec, Args&&... args) {
  if (spec.dtype == DType::kFloat64) {
    return std::make_unique<Kind<double>>(spec, std::forward<Args>(args)...);
  }
  return std::make_unique<Kind<float>>(spec, std::forward<Args>(args)...);
}

}  // namespace dad
