#include "runtime/observe/stall_watch.h"

#include <algorithm>
#include <map>

#include "util/log.h"

namespace dad {
namespace {

std::string NameRanks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::chrono::milliseconds IntervalFor(const Options& options) {
  double shortest = options.stall_warning_seconds;
  if (options.stall_shutdown_seconds > 0) {
    shortest = std::min(shortest, options.stall_shutdown_seconds);
  }
  return std::chrono::milliseconds(
      std::clamp(static_cast<int64_t>(shortest * 250), int64_t{20}, int64_t{5000}));
}

int64_t Whole(double seconds) { return static_cast<int64_t>(seconds); }

// "last submitted allreduce "a" 60 s ago, has barrier "barrier" open for rank 0; at train.py:31".
std::string WhatItDoes(const Snapshot& snapshot) {
  std::string text;
  if (snapshot.last_submitted.empty()) {
    text = "has submitted nothing yet";
  } else {
    text = "last submitted " + snapshot.last_submitted + " " +
           std::to_string(Whole(snapshot.since_submit)) + " s ago";
  }
  if (snapshot.joined) text += ", has joined";
  for (const Snapshot::Open& open : snapshot.requests) {
    if (open.waits_for.empty()) continue;
    text += ", waits in " + open.what + " for " + NameRanks(open.waits_for);
    break;
  }
  if (!snapshot.where.empty()) text += "; main thread: " + snapshot.where;
  return text;
}

bool WaitsForOneOf(const Snapshot& snapshot, const std::vector<int>& others) {
  return std::any_of(
      snapshot.requests.begin(), snapshot.requests.end(), [&](const Snapshot::Open& open) {
        return std::any_of(open.waits_for.begin(), open.waits_for.end(), [&](int rank) {
          return std::find(others.begin(), others.end(), rank) != others.end();
        });
      });
}

// One entry per rank; ranks that do the same share theirs.
struct Entry {
  std::vector<int> ranks;
  std::string what;
};
std::vector<Entry> Entries(const std::vector<int>& ranks, const std::vector<Snapshot>& answers) {
  std::vector<Entry> entries;
  for (int rank : ranks) {
    const auto answer = std::find_if(answers.begin(), answers.end(),
                                     [rank](const Snapshot& s) { return s.rank == rank; });
    const std::string what = answer == answers.end()
                                 ? "does not answer: it was stopped, or its host is gone"
                                 : WhatItDoes(*answer);
    const auto same = std::find_if(entries.begin(), entries.end(),
                                   [&](const Entry& entry) { return entry.what == what; });
    if (same != entries.end()) {
      same->ranks.push_back(rank);
    } else {
      entries.push_back({{rank}, what});
    }
  }
  return entries;
}

// What users can do about it.
std::string Cure(int rank, const std::vector<int>& missing, const std::vector<Snapshot>& answers) {
  const bool circle = std::any_of(answers.begin(), answers.end(), [&](const Snapshot& answer) {
    return answer.rank != rank && WaitsForOneOf(answer, {rank});
  });
  if (circle) {
    return "They wait for each other: they call collectives in different orders, or took different "
           "branches. Let all ranks make the same calls in the same order";
  }
  if (answers.size() < missing.size()) return "See whether that process and its host still run";
  return "Either that line takes long, or " +
         std::string(missing.size() == 1 ? "that rank" : "those ranks") +
         " took another branch than the others, or had fewer batches (then call join() after the "
         "last one)";
}

}  // namespace

StallWatch::StallWatch(int rank, const Options& options, Ask ask)
    : rank_(rank),
      enabled_(options.stall_check),
      warn_after_(options.stall_warning_seconds),
      give_up_after_(options.stall_shutdown_seconds),
      interval_(IntervalFor(options)),
      ask_(std::move(ask)) {}

std::optional<std::string> StallWatch::Check(const Lane& lane, Clock::time_point now) {
  const auto before = [now](std::chrono::duration<double> age) {
    return now - std::chrono::duration_cast<Clock::duration>(age);
  };
  std::map<std::pair<std::vector<int>, bool>, Requests> late;  // by the ranks they wait for
  for (const Lane::Stalled& stalled : lane.StalledSince(before(warn_after_))) {
    if (stalled.ranks.empty() || stalled.request->warned) continue;
    stalled.request->warned = true;
    late[{stalled.ranks, stalled.is_ready}].push_back(stalled.request);
  }
  for (const auto& [key, requests] : late) {
    const auto& [missing, is_ready] = key;
    const auto first =
        std::find_if(lane.ranks().begin(), lane.ranks().end(), [&missing = missing](int rank) {
          return std::find(missing.begin(), missing.end(), rank) == missing.end();
        });
    // In a later round each rank may wait for others.
    if (is_ready || first == lane.ranks().end() || *first == rank_)
      Question(requests, missing, /*warns=*/true, now);
  }
  if (give_up_after_.count() <= 0) return std::nullopt;
  for (const Lane::Stalled& stalled : lane.StalledSince(before(give_up_after_))) {
    if (stalled.ranks.empty()) continue;
    RequestState& request = *stalled.request;
    if (!request.asked_about) Question({stalled.request}, stalled.ranks, /*warns=*/false, now);
    if (request.doing.empty()) continue;  // the answers are on their way
    return std::string(Name(request.meta.kind)) + " \"" + request.meta.name +
           (stalled.is_ready ? "\" got nothing from " : "\" was not submitted by ") +
           NameRanks(stalled.ranks) + " within " + std::to_string(Whole(give_up_after_.count())) +
           " s (DAD_STALL_SHUTDOWN_TIME_SECONDS). " + request.doing;
  }
  return std::nullopt;
}

// The missing ranks, and this one for comparison.
void StallWatch::Question(const Requests& requests, const std::vector<int>& missing, bool warns,
                          Clock::time_point now) {
  const auto oldest =
      *std::min_element(requests.begin(), requests.end(),
                        [](const auto& a, const auto& b) { return a->submitted < b->submitted; });
  std::string head = std::string(Name(oldest->meta.kind)) + " \"" + oldest->meta.name + "\"";
  if (requests.size() > 1) head += " and " + std::to_string(requests.size() - 1) + " more";
  const double age = std::chrono::duration<double>(now - oldest->submitted).count();
  head += (requests.size() > 1 ? " have waited for " : " has waited for ") +
          std::to_string(Whole(age)) + " s for " + NameRanks(missing);
  const std::string end = WhenItEnds(*oldest, now);

  std::vector<std::weak_ptr<RequestState>> about(requests.begin(), requests.end());
  for (const auto& request : requests) request->asked_about = true;
  std::vector<int> asked = missing;
  asked.push_back(rank_);
  ask_(asked, [this, about, missing, head, end, warns](const std::vector<Snapshot>& answers) {
    std::string lines, doing;
    for (const Entry& entry : Entries(missing, answers)) {
      lines += "\n  " + NameRanks(entry.ranks) + ": " + entry.what;
      doing += (doing.empty() ? "" : "; ") + NameRanks(entry.ranks) + ": " + entry.what;
    }
    std::string here;
    for (const Snapshot& answer : answers) {
      if (answer.rank == rank_) here = answer.where;
    }
    if (!here.empty()) {
      lines += "\n  this rank, main thread: " + here;
      doing += "; rank " + std::to_string(rank_) + ", which waits: main thread: " + here;
    }
    const std::string cure = Cure(rank_, missing, answers);
    doing += ". " + cure;
    bool open = false;
    for (const auto& weak : about) {
      const auto request = weak.lock();
      if (!request || request->finished()) continue;
      request->doing = doing;
      open = true;
    }
    if (!warns || !open) return;
    DAD_LOG(Warning) << head << lines << "\n  " << cure << ". " << end;
  });
}

std::string StallWatch::WhenItEnds(const RequestState& request, Clock::time_point now) const {
  if (give_up_after_.count() <= 0) {
    return "The job waits on, without end; DAD_STALL_SHUTDOWN_TIME_SECONDS sets one";
  }
  const double left =
      give_up_after_.count() - std::chrono::duration<double>(now - request.submitted).count();
  return "The job ends in " + std::to_string(std::max<int64_t>(Whole(left), 0)) +
         " s (DAD_STALL_SHUTDOWN_TIME_SECONDS)";
}

}  // namespace dad
