#include "transport/tcp/store_adaptor.h"

#include <gloo/common/error.h>

#include <algorithm>

#include "util/log.h"

namespace dad::tcp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kMostNamed = 16;

// gloo's keys are "rank_3" (a host name) and "3" (addresses).
size_t RankStart(const std::string& key) {
  const size_t underscore = key.rfind('_');
  return underscore == std::string::npos ? 0 : underscore + 1;
}

milliseconds Until(Clock::time_point time) {
  const auto left = std::chrono::duration_cast<milliseconds>(time - Clock::now());
  return std::max(left, milliseconds(0));
}

}  // namespace

void StoreAdaptor::set(const std::string& key, const std::vector<char>& data) {
  if (Status set = store_->Set(key, std::string(data.begin(), data.end())); !set.ok()) Fail(set);
  own_keys_.push_back(key);
}

std::vector<char> StoreAdaptor::get(const std::string& key) {
  const bool may_name = name_missing_at_.has_value() && *name_missing_at_ < deadline_;
  Result<std::string> value = store_->Get(key, Until(may_name ? *name_missing_at_ : deadline_));
  if (!value.ok() && value.status().code() == StatusCode::kTimeout && may_name) {
    name_missing_at_.reset();
    NameMissingRanks(key);
    value = store_->Get(key, Until(deadline_));
  }
  if (value.ok()) return {value.value().begin(), value.value().end()};
  if (value.status().code() != StatusCode::kTimeout) Fail(value.status());
  Fail(
      Status::Timeout("rank " + key.substr(RankStart(key)) +
                      " did not arrive in time: its output says why, or DAD_START_TIMEOUT gives it "
                      "more (" +
                      value.status().message() + ")"));
}

void StoreAdaptor::NameMissingRanks(const std::string& key) {
  const std::string stem = key.substr(0, RankStart(key));
  std::string names;
  size_t missing = 0;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const bool arrived = store_->Get(stem + std::to_string(rank), milliseconds(0)).ok();
    if (arrived && rank < rank_) return;
    if (!arrived && ++missing <= kMostNamed) {
      names += (names.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  if (missing == 0) return;
  if (missing > kMostNamed) names += " and " + std::to_string(missing - kMostNamed) + " more";
  const auto left = std::chrono::duration_cast<std::chrono::seconds>(Until(deadline_));
  DAD_LOG(Warning) << "still waiting for rank" << (missing > 1 ? "s " : " ") << names << " of "
                   << size_ << " to call init(); giving up in " << left.count()
                   << " s (DAD_START_TIMEOUT)";
}

void StoreAdaptor::wait(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) get(key);
}

void StoreAdaptor::RemoveOwnKeys() {
  // A key that stays behind does no harm: its scope is never used again.
  for (const std::string& key : own_keys_) (void)store_->Delete(key);
  own_keys_.clear();
}

void StoreAdaptor::Fail(Status failure) {
  failure_ = std::move(failure);
  throw ::gloo::IoException(failure_.message());
}

}  // namespace dad::tcp
