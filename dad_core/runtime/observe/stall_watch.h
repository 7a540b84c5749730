// Names the tensors that some ranks have submitted and others have not, and reports what those
// ranks are doing instead. Worker only.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "dad/options.h"
#include "runtime/lane/lane.h"
#include "runtime/observe/inquiry.h"

namespace dad {

class StallWatch {
 public:
  using Clock = std::chrono::steady_clock;
  // Asks ranks what they do (Inquiry::Ask).
  using Ask = std::function<void(const std::vector<int>& ranks, Inquiry::Done done)>;

  // `rank`: the rank of this process.
  StallWatch(int rank, const Options& options, Ask ask);

  bool enabled() const { return enabled_; }
  std::chrono::milliseconds interval() const { return interval_; }

  // Warns once per request, when the ranks that lack it have answered. Requests that wait for the
  // same ranks share a warning, and among the ranks that wait for the same ones, the lowest gives
  // it. Returns the reason to give up when a request has waited too long.
  std::optional<std::string> Check(const Lane& lane, Clock::time_point now);

 private:
  using Requests = std::vector<std::shared_ptr<RequestState>>;
  void Question(const Requests& requests, const std::vector<int>& missing, bool warns,
                Clock::time_point now);
  std::string WhenItEnds(const RequestState& request, Clock::time_point now) const;

  const int rank_;
  const bool enabled_;
  const std::chrono::duration<double> warn_after_;
  const std::chrono::duration<double> give_up_after_;  // 0: never
  const std::chrono::milliseconds interval_;
  const Ask ask_;
};

}  // namespace dad
