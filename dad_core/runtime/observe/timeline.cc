#include "runtime/observe/timeline.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "runtime/execute/executor.h"
#include "runtime/lane/batch_id.h"
#include "runtime/request_state.h"

namespace dad {
namespace {

std::string Upper(const char* text) {
  std::string upper;
  for (; *text != '\0'; ++text) {
    upper += static_cast<char>(toupper(static_cast<unsigned char>(*text)));
  }
  return upper;
}

std::string Escaped(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      snprintf(code, sizeof code, "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out;
}

// Tracks of different ranks must not overlap when their files are joined.
constexpr int kTracksPerRank = 1000000;

// Events are written together, when there are this many or the first is this old. The time is short
// because scripts for Horovod read the file 100 ms after a collective.
constexpr size_t kFlushBytes = 64 << 10;
constexpr std::chrono::milliseconds kFlushAfter{20};

// As Horovod calls the tensor of a request: "allreduce.x". Unnamed ones are called so already.
std::string HorovodName(const RequestMeta& meta) {
  const std::string prefix = std::string(Name(meta.kind)) + '.';
  std::string name = meta.name.starts_with(prefix) ? meta.name : prefix + meta.name;
  if (meta.host_step != HostStep::kNone) name += std::string(" (") + Name(meta.host_step) + ')';
  return name;
}

template <typename... Values>
std::string Format(const char* format, Values... values) {
  std::string text(static_cast<size_t>(snprintf(nullptr, 0, format, values...)), '\0');
  snprintf(text.data(), text.size() + 1, format, values...);
  return text;
}

// The step of the tensor, and the rank that it waited for, if known yet.
std::string Args(const RequestState& request) {
  std::string args = "\"step\":" + std::to_string(request.step);
  if (request.last_rank >= 0) args += ",\"last_rank\":" + std::to_string(request.last_rank);
  return args;
}

}  // namespace

Status Timeline::Start(const std::string& path, bool mark_cycles) {
  MutexLock lock(mutex_);
  if (file_ >= 0) return Status::InvalidArgument("a timeline is being written already");
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) {
    return Status::InvalidArgument("timeline " + path + ": " + std::strerror(errno));
  }
  end_ = 0;
  failed_ = false;
  mark_cycles_ = mark_cycles;
  zero_ = Clock::now();
  tracks_.clear();
  const auto unix_us = std::chrono::duration_cast<std::chrono::microseconds>(
                           std::chrono::system_clock::now().time_since_epoch())
                           .count();
  pending_ = Format(
      "[\n{\"name\":\"dad_clock\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"rank\":%d,"
      "\"start_unix_us\":%lld,\"offset_to_rank0_us\":%lld,"
      "\"start_time_since_epoch_in_micros\":%lld}}",  // Horovod's name for start_unix_us
      rank_ * kTracksPerRank, rank_, static_cast<long long>(unix_us),
      static_cast<long long>(offset_us_), static_cast<long long>(unix_us));
  Flush();
  on_ = true;
  return Status::Ok();
}

Status Timeline::Stop() {
  MutexLock lock(mutex_);
  on_ = false;
  if (file_ < 0) return Status::Ok();
  Flush();
  const bool closed = close(file_) == 0;
  file_ = -1;
  return failed_ || !closed ? Status::Internal("timeline: writing failed") : Status::Ok();
}

void Timeline::Started(const RequestState& request) {
  if (!on_) return;
  const std::string what =
      request.negotiated ? "NEGOTIATE_" + Upper(Name(request.meta.kind)) : "WAIT_FOR_BATCH";
  MutexLock lock(mutex_);
  Write(request, what, request.submitted, request.started, Args(request));
}

void Timeline::Round(const std::vector<BatchPart>& parts, const BatchRound& round) {
  if (!on_) return;
  MutexLock lock(mutex_);
  std::string arrived;
  for (const auto& [rank, at] : round.arrived) {
    arrived += Format("%s\"%d\":%lld", arrived.empty() ? "" : ",", rank,
                      static_cast<long long>(Micros(at)));
  }
  for (const BatchPart& part : parts) {
    if (!part.request) continue;
    Write(*part.request, "ROUND_" + std::to_string(round.round), round.started, round.ended,
          Format("\"step\":%lld,\"batch\":\"%s\",\"last_rank\":%d,\"arrived_us\":{%s}",
                 static_cast<long long>(part.request->step), BatchName(round.batch).c_str(),
                 round.last_rank, arrived.c_str()));
  }
}

void Timeline::Recalled(const Recall& recall, Clock::time_point at) {
  if (!on_) return;
  const auto names = [](const std::vector<std::string>& tensors) {
    std::string text;
    for (const std::string& name : tensors) {
      text += (text.empty() ? "\"" : ",\"") + Escaped(name) + '"';
    }
    return text;
  };
  std::string ranks;
  for (int rank : recall.ranks) ranks += (ranks.empty() ? "" : ",") + std::to_string(rank);
  MutexLock lock(mutex_);
  if (file_ < 0) return;
  Append(
      Format("{\"name\":\"RECALL\",\"ph\":\"i\",\"s\":\"g\",\"ts\":%lld,\"pid\":%d,\"args\":"
             "{\"schedule\":%u,\"ranks\":[%s],\"missing\":[%s],\"changed\":[%s]}}",
             static_cast<long long>(Micros(at)), rank_ * kTracksPerRank, recall.schedule,
             ranks.c_str(), names(recall.missing).c_str(), names(recall.changed).c_str()));
}

void Timeline::Finished(const RequestState& request) {
  if (!on_ || request.started == Clock::time_point()) return;
  MutexLock lock(mutex_);
  Write(request, Upper(Name(request.meta.kind)), request.started, Clock::now(), Args(request));
}

void Timeline::Cycle() {
  if (!on_) return;
  MutexLock lock(mutex_);
  if (file_ < 0 || !mark_cycles_) return;
  Append(Format("{\"name\":\"CYCLE_START\",\"ph\":\"i\",\"s\":\"g\",\"ts\":%lld,\"pid\":%d}",
                static_cast<long long>(Micros(Clock::now())), rank_ * kTracksPerRank));
}

std::optional<Timeline::Clock::time_point> Timeline::NextFlush() {
  if (!on_) return std::nullopt;
  MutexLock lock(mutex_);
  if (pending_.empty()) return std::nullopt;
  return pending_since_ + kFlushAfter;
}

void Timeline::FlushIfDue(Clock::time_point now) {
  if (!on_) return;
  MutexLock lock(mutex_);
  if (file_ >= 0 && !pending_.empty() && now >= pending_since_ + kFlushAfter) Flush();
}

void Timeline::Write(const RequestState& request, const std::string& what, Clock::time_point from,
                     Clock::time_point to, const std::string& args) {
  if (file_ < 0 || from < zero_) return;
  const int track = TrackOf(request);
  Append(Format(
      "{\"name\":\"%s\",\"ph\":\"X\",\"ts\":%lld,\"dur\":%lld,\"pid\":%d,\"tid\":0,\"args\":{%s}}",
      what.c_str(), static_cast<long long>(Micros(from)),
      static_cast<long long>(Micros(to) - Micros(from)), track, args.c_str()));
}

int64_t Timeline::Micros(Clock::time_point at) const {
  return std::chrono::duration_cast<std::chrono::microseconds>(at - zero_).count();
}

int Timeline::TrackOf(const RequestState& request) {
  const std::string name = HorovodName(request.meta);
  const int next = rank_ * kTracksPerRank + 1 + static_cast<int>(tracks_.size());
  const auto [found, is_new] = tracks_.emplace(name, next);
  if (is_new) {
    Append(
        Format("{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"%s\","
               "\"tensor\":\"%s\",\"rank\":%d}}",
               next, Escaped(name).c_str(), Escaped(request.meta.name).c_str(), rank_));
  }
  return found->second;
}

void Timeline::Append(const std::string& event) {
  if (pending_.empty()) pending_since_ = Clock::now();
  pending_ += ",\n" + event;
  if (pending_.size() >= kFlushBytes) Flush();
}

// Each write ends with the bracket that closes the array, and begins where the previous bracket is:
// whatever ends this process, the file can be read.
void Timeline::Flush() {
  const size_t events = pending_.size();
  pending_ += "\n]\n";
  for (size_t done = 0; done < pending_.size();) {
    const ssize_t count = pwrite(file_, pending_.data() + done, pending_.size() - done,
                                 static_cast<off_t>(end_ + static_cast<int64_t>(done)));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      failed_ = true;
      break;
    }
    done += static_cast<size_t>(count);
  }
  end_ += static_cast<int64_t>(events);
  pending_.clear();
}

}  // namespace dad
