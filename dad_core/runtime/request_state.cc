#include "runtime/request_state.h"

namespace dad {
namespace {

int DeviceOf(const Request& request) {
  if (request.tensors.empty()) return -1;
  const TensorView& input = request.tensors[0].input;
  return input.device == DeviceType::kCuda ? input.device_index : -1;
}

uint64_t NextSubmitId() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

RequestState::RequestState(Request r, std::shared_ptr<Inbox> inbox,
                           std::shared_ptr<PhaseCounter> phases, Clock::time_point now)
    : request(std::move(r)),
      meta(MetaOf(request)),
      key(KeyOf(meta)),
      submit_id(NextSubmitId()),
      submitted(now),
      device_index(DeviceOf(request)),
      inbox_(std::move(inbox)),
      phases_(std::move(phases)) {
  if (phases_) phase = phases_->NextSubmit();
}

bool RequestState::Done() {
  if (finished()) return true;
  TellPolled();
  return false;
}

void RequestState::TellPolled() {
  if (inbox_ && !told_polled_.exchange(true)) {
    inbox_->Post(WaitingEvent{shared_from_this(), /*polls=*/true});
  }
}

void RequestState::UserWaits() {
  if (phases_) phases_->UserWaits();
  if (!finished() && inbox_) inbox_->Post(WaitingEvent{shared_from_this()});
}

Status RequestState::Wait(std::chrono::milliseconds timeout) {
  UserWaits();
  std::unique_lock lock(mutex_);
  auto done = [this] { return finished(); };
  if (timeout.count() < 0) {
    finished_.wait(lock, done);
  } else if (!finished_.wait_for(lock, timeout, done)) {
    return Status::Timeout("\"" + meta.name + "\": not finished after " +
                           std::to_string(timeout.count()) + " ms");
  }
  // Here, and not on the worker: releasing a tensor may need the framework's lock.
  std::shared_ptr<void> released = std::move(request.keep_alive);
  Status status = status_;
  lock.unlock();
  // The device may still be using it.
  if (device_index >= 0) KeepUntil(device_index, this->done, std::move(released));
  return status;
}

void RequestState::OnDone(std::function<void(const Status&)> done) {
  {
    std::lock_guard lock(mutex_);
    if (!finished()) {
      callback_ = std::move(done);
      TellPolled();
      return;
    }
  }
  done(status_);
}

void RequestState::Watch(bool user_waits, std::function<void(const Status&)> done) {
  callback_ = std::move(done);
  told_polled_ = true;
  (user_waits ? waited_for : polled) = true;
}

void RequestState::Complete(const Status& status) {
  std::function<void(const Status&)> callback;
  {
    std::lock_guard lock(mutex_);
    status_ = status;
    callback = std::move(callback_);
    done_.store(true, std::memory_order_release);
  }
  finished_.notify_all();
  if (callback) callback(status);
}

}  // namespace dad
