// Lines on stderr: "[dad rank 2] WARNING text". Level from DAD_LOG_LEVEL.
#pragma once

#include <sstream>
#include <string>

#include "dad/export.h"

namespace dad {

enum class LogLevel { kTrace = 0, kDebug, kInfo, kWarning, kError, kFatal };

void SetLogLevel(LogLevel level, bool hide_time);
void SetLogRank(int rank);
DAD_EXPORT bool LogEnabled(LogLevel level);
DAD_EXPORT void LogLine(LogLevel level, const std::string& text);

class LogMessage {
 public:
  explicit LogMessage(LogLevel level) : level_(level) {}
  ~LogMessage() { LogLine(level_, text_.str()); }
  std::ostringstream& text() { return text_; }

 private:
  LogLevel level_;
  std::ostringstream text_;
};

}  // namespace dad

#define DAD_LOG(level)                                 \
  if (!::dad::LogEnabled(::dad::LogLevel::k##level)) { \
  } else                                               \
    ::dad::LogMessage(::dad::LogLevel::k##level).text()
