#include "transport/gloo/store_adaptor.h"

#include <gloo/common/error.h>

#include <algorithm>

namespace dad::gloo_transport {
namespace {

// gloo's keys are "rank_3" (a host name) and "3" (addresses).
std::string RankOf(const std::string& key) {
  const size_t underscore = key.rfind('_');
  return underscore == std::string::npos ? key : key.substr(underscore + 1);
}

}  // namespace

void StoreAdaptor::set(const std::string& key, const std::vector<char>& data) {
  if (Status set = store_->Set(key, std::string(data.begin(), data.end())); !set.ok()) Fail(set);
  own_keys_.push_back(key);
}

std::vector<char> StoreAdaptor::get(const std::string& key) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline_ - std::chrono::steady_clock::now());
  Result<std::string> value = store_->Get(key, std::max(left, std::chrono::milliseconds(0)));
  if (value.ok()) return {value.value().begin(), value.value().end()};
  if (value.status().code() != StatusCode::kTimeout) Fail(value.status());
  Fail(
      Status::Timeout("rank " + RankOf(key) +
                      " did not arrive in time: its output says why, or DAD_START_TIMEOUT gives it "
                      "more (" +
                      value.status().message() + ")"));
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

}  // namespace dad::gloo_transport
