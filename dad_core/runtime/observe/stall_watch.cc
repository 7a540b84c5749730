#include "runtime/observe/stall_watch.h"

#include <algorithm>

#include "util/log.h"

namespace dad {
namespace {

std::string List(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
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

}  // namespace

StallWatch::StallWatch(const Options& options)
    : enabled_(options.stall_check),
      warn_after_(options.stall_warning_seconds),
      give_up_after_(options.stall_shutdown_seconds),
      interval_(IntervalFor(options)) {}

std::optional<std::string> StallWatch::Check(const Lane& lane, Clock::time_point now) {
  const auto warn_before = now - std::chrono::duration_cast<Clock::duration>(warn_after_);
  for (const Lane::Stalled& stalled : lane.StalledSince(warn_before)) {
    if (stalled.ranks.empty()) continue;
    RequestState& request = *stalled.request;
    const auto age =
        std::chrono::duration_cast<std::chrono::seconds>(now - request.submitted).count();
    if (!request.warned) {
      request.warned = true;
      DAD_LOG(Warning) << Name(request.meta.kind) << " \"" << request.shown_name()
                       << "\" has waited for " << age << " s for rank(s) " << List(stalled.ranks)
                       << ": have they stopped, or taken another branch?";
    }
  }
  if (give_up_after_.count() <= 0) return std::nullopt;
  const auto give_up_before = now - std::chrono::duration_cast<Clock::duration>(give_up_after_);
  for (const Lane::Stalled& stalled : lane.StalledSince(give_up_before)) {
    if (stalled.ranks.empty()) continue;
    return std::string(Name(stalled.request->meta.kind)) + " \"" + stalled.request->shown_name() +
           "\" was not submitted by rank(s) " + List(stalled.ranks) + " within " +
           std::to_string(static_cast<int64_t>(give_up_after_.count())) + " s";
  }
  return std::nullopt;
}

}  // namespace dad
