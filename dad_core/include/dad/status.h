// Status and Result<T>: how every function of the core reports failure. No
// exception leaves the core; the framework edges turn a Status into their own
// kind of error.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include "dad/export.h"

namespace dad {

enum class StatusCode : uint8_t {
  kOk = 0,
  kInvalidArgument,     // this rank asked for something that cannot be
  kFailedPrecondition,  // ranks disagree (shape, dtype, op, root, method); the engine keeps running
  kAborted,             // a peer died, fell silent or shut down; the engine is dead
  kTimeout,             // not finished in the time given
  kUnavailable,         // a plug-in, an interface or a host is not there
  kInternal,            // a broken invariant
};

DAD_EXPORT const char* StatusCodeName(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return {}; }
  static Status InvalidArgument(std::string m) {
    return {StatusCode::kInvalidArgument, std::move(m)};
  }
  static Status FailedPrecondition(std::string m) {
    return {StatusCode::kFailedPrecondition, std::move(m)};
  }
  static Status Aborted(std::string m) { return {StatusCode::kAborted, std::move(m)}; }
  static Status Timeout(std::string m) { return {StatusCode::kTimeout, std::move(m)}; }
  static Status Unavailable(std::string m) { return {StatusCode::kUnavailable, std::move(m)}; }
  static Status Internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  std::string ToString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : held_(std::move(value)) {}         // NOLINT: implicit by design
  Result(Status status) : held_(std::move(status)) {}  // NOLINT: implicit by design

  bool ok() const { return std::holds_alternative<T>(held_); }
  Status status() const { return ok() ? Status::Ok() : std::get<Status>(held_); }
  T& value() & { return std::get<T>(held_); }
  const T& value() const& { return std::get<T>(held_); }
  T&& value() && { return std::get<T>(std::move(held_)); }

 private:
  std::variant<Status, T> held_;
};

}  // namespace dad

#define DAD_RETURN_IF_ERROR(expr)                                                  \
  do {                                                                             \
    if (::dad::Status dad_status_ = (expr); !dad_status_.ok()) return dad_status_; \
  } while (0)
