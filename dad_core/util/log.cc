#include "util/log.h"

#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <ctime>

namespace dad {
namespace {

// The level and the rank are process-wide because a line has to go out before an
// engine exists and after it is gone.
std::atomic<int> g_level{static_cast<int>(LogLevel::kWarning)};
std::atomic<bool> g_hide_time{false};
std::atomic<int> g_rank{-1};

const char* LevelName(LogLevel level) {
  static constexpr const char* kNames[] = {"TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"};
  return kNames[static_cast<int>(level)];
}

}  // namespace

void SetLogLevel(LogLevel level, bool hide_time) {
  g_level = static_cast<int>(level);
  g_hide_time = hide_time;
}

void SetLogRank(int rank) { g_rank = rank; }

bool LogEnabled(LogLevel level) { return static_cast<int>(level) >= g_level.load(); }

void LogLine(LogLevel level, const std::string& text) {
  std::string line;
  if (!g_hide_time) {
    timeval now{};
    gettimeofday(&now, nullptr);
    tm local{};
    localtime_r(&now.tv_sec, &local);
    char stamp[48];
    const size_t n = strftime(stamp, sizeof stamp, "%Y-%m-%d %H:%M:%S", &local);
    snprintf(stamp + n, sizeof stamp - n, ".%03d ", static_cast<int>(now.tv_usec / 1000));
    line = stamp;
  }
  const int rank = g_rank.load();
  line += rank >= 0 ? "[dad rank " + std::to_string(rank) + "] " : "[dad] ";
  line += std::string(LevelName(level)) + ": " + text + "\n";
  // One write, so that lines of many processes do not mix.
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace dad
