#include "dad/options.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string_view>

namespace dad {
namespace {

// One row of the table. `parse` stores the text in the options, or says what it
// expected instead.
struct Row {
  const char* name;
  const char* default_value;
  const char* dad_variable;
  const char* horovod_variable;
  const char* meaning;
  std::string (*parse)(const std::string& text, Options& options);
};

std::string ParseNumber(const std::string& text, double low, double& out) {
  char* end = nullptr;
  errno = 0;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || errno != 0 || !std::isfinite(value) || value < low) {
    return "a number of at least " + std::to_string(static_cast<int64_t>(low));
  }
  out = value;
  return "";
}

std::string ParseInt(const std::string& text, int64_t low, int64_t& out) {
  double value = 0;
  std::string expected = ParseNumber(text, static_cast<double>(low), value);
  if (!expected.empty() || value != std::floor(value) || value > 9e15) {
    return "a whole number of at least " + std::to_string(low);
  }
  out = static_cast<int64_t>(value);
  return "";
}

std::string ParseBool(const std::string& text, bool& out) {
  if (text == "1" || text == "true" || text == "True" || text == "yes" || text == "on") {
    out = true;
  } else if (text == "0" || text == "false" || text == "False" || text == "no" || text == "off" ||
             text.empty()) {
    out = false;
  } else {
    return "0 or 1";
  }
  return "";
}

constexpr Row kTable[] = {
    {"fusion_bytes", "2097152", "DAD_FUSION_BYTES", "HOROVOD_FUSION_THRESHOLD",
     "Tensors are fused into batches of up to this many bytes, and large ones are cut into slices "
     "of an eighth of it to all of it; 0 sends every tensor by itself.",
     [](const std::string& t, Options& o) { return ParseInt(t, 0, o.fusion_bytes); }},
    {"cycle_time_ms", "0", "DAD_CYCLE_TIME_MS", "HOROVOD_CYCLE_TIME",
     "How long a rank gathers newly ready tensors before it tells the others, in the steps before "
     "the schedule is known. 0 tells at once.",
     [](const std::string& t, Options& o) { return ParseNumber(t, 0, o.cycle_time_ms); }},
    {"cache_capacity", "4096", "DAD_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY",
     "How many tensors the ranks remember; 0 negotiates every tensor by name every time.",
     [](const std::string& t, Options& o) { return ParseInt(t, 0, o.cache_capacity); }},
    {"direct_bytes", "4096", "DAD_DIRECT_BYTES", "",
     "Dense sums of at most this many bytes (all that travel together) go to every rank in one "
     "round instead of to owners and back in two.",
     [](const std::string& t, Options& o) { return ParseInt(t, 0, o.direct_bytes); }},
    {"ring_bytes", "-1", "DAD_RING_BYTES", "",
     "Dense tensors (float32, float64) of at least this many bytes for each rank go around a ring "
     "instead of to owners and back. 0: none. -1: from 1 MB per rank on, where a round trip "
     "between ranks takes 2 ms or more at start-up, or the kernel has seen fewer than 50 MB/s "
     "leave "
     "in the first step; none if deterministic.",
     [](const std::string& t, Options& o) { return ParseInt(t, -1, o.ring_bytes); }},
    {"pack", "-1", "DAD_PACK", "",
     "Dense tensors and factors of float32 and bfloat16 travel packed, without loss: about a sixth "
     "fewer bytes, of tensors more where many are zero, for some time of the CPU. 0: never. 1: "
     "always. -1: where the "
     "kernel has seen fewer than 50 MB/s leave so far, from the second step on.",
     [](const std::string& t, Options& o) {
       const std::string expected = ParseInt(t, -1, o.pack);
       return expected.empty() && o.pack <= 1 ? expected : std::string("-1, 0 or 1");
     }},
    {"hierarchical_allreduce", "0", "DAD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLREDUCE",
     "1: reductions over all ranks are formed inside each host first, and one rank of each host "
     "exchanges them, dense or by a method: for hosts with several ranks and a slow link. Exact "
     "factors go between all ranks.",
     [](const std::string& t, Options& o) { return ParseBool(t, o.hierarchical_allreduce); }},
    {"deterministic", "0", "DAD_DETERMINISTIC", "",
     "Results do not depend on timing. Dense sums do by the choice of a ring only; other methods "
     "give up "
     "speed for it.",
     [](const std::string& t, Options& o) { return ParseBool(t, o.deterministic); }},
    {"join_strict", "0", "DAD_JOIN_STRICT", "HOROVOD_JOIN_STRICT",
     "1: an allgather, broadcast, alltoall or reducescatter while some rank has joined is an "
     "error, "
     "as in Horovod. 0: joined ranks contribute no rows (or zeros).",
     [](const std::string& t, Options& o) { return ParseBool(t, o.join_strict); }},
    {"threads", "0", "DAD_THREADS", "",
     "How many threads may work on one large tensor (sparse methods). 0: this rank's share of the "
     "cores of its host (DAD_THREADS_PER_RANK).",
     [](const std::string& t, Options& o) { return ParseInt(t, 0, o.threads); }},
    {"timeout_seconds", "30", "DAD_TIMEOUT_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS",
     "A peer that sends nothing and takes nothing for this long while we wait for it is an error.",
     [](const std::string& t, Options& o) { return ParseNumber(t, 0, o.timeout_seconds); }},
    {"start_timeout_seconds", "60", "DAD_START_TIMEOUT", "HOROVOD_START_TIMEOUT",
     "How long init() waits for the other ranks.",
     [](const std::string& t, Options& o) { return ParseNumber(t, 0, o.start_timeout_seconds); }},
    {"device_timeout_seconds", "600", "DAD_DEVICE_TIMEOUT_SECONDS", "",
     "An operation of NCCL that has not finished after this long is an error.",
     [](const std::string& t, Options& o) { return ParseNumber(t, 0, o.device_timeout_seconds); }},
    {"stall_check_disable", "0", "DAD_STALL_CHECK_DISABLE", "HOROVOD_STALL_CHECK_DISABLE",
     "1: no warning about tensors that some ranks have not submitted.",
     [](const std::string& t, Options& o) {
       bool disable = false;
       std::string expected = ParseBool(t, disable);
       o.stall_check = !disable;
       return expected;
     }},
    {"stall_warning_seconds", "60", "DAD_STALL_CHECK_TIME_SECONDS",
     "HOROVOD_STALL_CHECK_TIME_SECONDS", "Age of a tensor at which the warning comes.",
     [](const std::string& t, Options& o) { return ParseNumber(t, 0, o.stall_warning_seconds); }},
    {"stall_shutdown_seconds", "0", "DAD_STALL_SHUTDOWN_TIME_SECONDS",
     "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "Age of a tensor at which all ranks give up; 0: never.",
     [](const std::string& t, Options& o) { return ParseNumber(t, 0, o.stall_shutdown_seconds); }},
    {"autotune", "0", "DAD_AUTOTUNE", "HOROVOD_AUTOTUNE",
     "1: fusion_bytes is tried out during the first steps and the fastest is kept.",
     [](const std::string& t, Options& o) { return ParseBool(t, o.autotune); }},
    {"autotune_log", "", "DAD_AUTOTUNE_LOG", "HOROVOD_AUTOTUNE_LOG",
     "File (CSV) in which rank 0 notes what autotuning tried.",
     [](const std::string& t, Options& o) {
       o.autotune_log = t;
       return std::string();
     }},
    {"timeline", "", "DAD_TIMELINE", "HOROVOD_TIMELINE",
     "File for a Chrome trace from init() on; ranks above 0 append .<rank>. DYNAMIC, which Horovod "
     "requires before start_timeline(), has no effect.",
     [](const std::string& t, Options& o) {
       o.timeline = t == "DYNAMIC" ? "" : t;
       return std::string();
     }},
    {"timeline_mark_cycles", "0", "DAD_TIMELINE_MARK_CYCLES", "HOROVOD_TIMELINE_MARK_CYCLES",
     "1: negotiations are marked in the trace.",
     [](const std::string& t, Options& o) { return ParseBool(t, o.timeline_mark_cycles); }},
    {"log_level", "WARNING", "DAD_LOG_LEVEL", "HOROVOD_LOG_LEVEL",
     "TRACE, DEBUG, INFO, WARNING, ERROR or FATAL.",
     [](const std::string& t, Options& o) {
       o.log_level.clear();
       for (char c : t) o.log_level += static_cast<char>(toupper(static_cast<unsigned char>(c)));
       for (const char* known : {"TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"}) {
         if (o.log_level == known) return std::string();
       }
       return std::string("TRACE, DEBUG, INFO, WARNING, ERROR or FATAL");
     }},
    {"log_hide_time", "0", "DAD_LOG_HIDE_TIME", "HOROVOD_LOG_HIDE_TIME",
     "1: log lines have no time stamp.",
     [](const std::string& t, Options& o) { return ParseBool(t, o.log_hide_time); }},
    {"interface", "", "DAD_GLOO_IFACE", "HOROVOD_GLOO_IFACE",
     "Network interface(s) for TCP, comma separated; by default the one that routes to the "
     "rendezvous server.",
     [](const std::string& t, Options& o) {
       o.interface = t;
       return std::string();
     }},
    {"port", "0", "DAD_PORT", "",
     "For firewalls: dadrun's server listens on this port, and the ranks of a host on those that "
     "follow, one each, while they connect. 0: any free ones.",
     [](const std::string& t, Options& o) {
       const std::string expected = ParseInt(t, 0, o.port);
       return expected.empty() && o.port <= 65535 ? expected : std::string("a port, or 0");
     }},
    {"transport", "gloo", "DAD_TRANSPORT", "HOROVOD_CPU_OPERATIONS",
     "Which plug-in moves the data: gloo or mpi.",
     [](const std::string& t, Options& o) {
       o.transport.clear();
       for (char c : t) o.transport += static_cast<char>(tolower(static_cast<unsigned char>(c)));
       if (o.transport == "gloo" || o.transport == "mpi") return std::string();
       return std::string("gloo or mpi");
     }},
};

// What horovod.run() of Horovod 0.28.1 puts into the environment of its ranks for settings
// that nobody gave: a tuple where None was meant. Horovod itself reads a number from its front.
constexpr std::string_view kUnsetByHorovod = "(None,)";

}  // namespace

Options::Options() {
  for (const Row& row : kTable) row.parse(row.default_value, *this);
}

Result<Options> Options::FromEnvironment(const Getenv& getenv) {
  Options options;
  for (const Row& row : kTable) {
    for (const char* variable : {row.dad_variable, row.horovod_variable}) {
      if (*variable == '\0') continue;
      const char* text = getenv(variable);
      if (text == nullptr || std::string_view(text) == kUnsetByHorovod) continue;
      if (std::string expected = row.parse(text, options); !expected.empty()) {
        return Status::InvalidArgument(std::string(variable) + "=\"" + text + "\": expected " +
                                       expected);
      }
      break;
    }
  }
  return options;
}

std::vector<OptionInfo> OptionTable() {
  std::vector<OptionInfo> table;
  for (const Row& row : kTable) {
    table.push_back(
        {row.name, row.default_value, row.dad_variable, row.horovod_variable, row.meaning});
  }
  return table;
}

}  // namespace dad
