// Every knob of the core, in one table: name, default, environment variables,
// meaning. Read once, before the worker starts.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dad/export.h"
#include "dad/status.h"

namespace dad {

struct DAD_EXPORT Options {
  int64_t fusion_bytes = 0;  // filled from the table's defaults by the constructor
  double cycle_time_ms = 0;
  int64_t cache_capacity = 0;
  int64_t direct_bytes = 0;
  int64_t ring_bytes = 0;
  int64_t pack = 0;
  bool hierarchical_allreduce = false;
  bool deterministic = false;
  bool join_strict = false;
  int64_t threads = 0;
  double timeout_seconds = 0;
  double start_timeout_seconds = 0;
  double device_timeout_seconds = 0;
  bool stall_check = false;
  double stall_warning_seconds = 0;
  double stall_shutdown_seconds = 0;
  bool autotune = false;
  std::string autotune_log;
  std::string timeline;
  bool timeline_mark_cycles = false;
  std::string log_level;
  bool log_hide_time = false;
  std::string interface;
  int64_t port = 0;
  std::string transport;

  Options();  // the defaults

  using Getenv = std::function<const char*(const char*)>;
  // DAD_X first, then HOROVOD_X. A value that does not parse is an error that
  // names variable, value and what was expected.
  static Result<Options> FromEnvironment(const Getenv& getenv);
};

struct OptionInfo {
  std::string name;
  std::string default_value;
  std::string dad_variable;
  std::string horovod_variable;  // empty: Horovod has none
  std::string meaning;
};
DAD_EXPORT std::vector<OptionInfo> OptionTable();

}  // namespace dad
