// How an engine ends: it aborts and names the culprit, or it shuts down.
#include <algorithm>
#include <utility>

#include "runtime/worker.h"
#include "util/byte_io.h"
#include "util/log.h"

namespace dad {
namespace {

// How long a rank that shuts down waits for the others to notice, while no bytes move.
constexpr std::chrono::seconds kGoodbyePatience{3};
// How long sending the news of a fault may take.
constexpr std::chrono::milliseconds kAbortFlush{500};

}  // namespace

void Worker::Abort(int culprit, const std::string& why) {
  if (abort_wanted_ || aborted_) return;
  abort_wanted_ = true;
  culprit_ = culprit;
  abort_reason_ = why;
}

// Tell the others who it was before anything is closed: to them, a rank that closes its connections
// looks dead itself.
void Worker::DoAbort() {
  aborted_ = true;
  const std::string rank = "rank " + std::to_string(culprit_);
  std::string who;
  if (culprit_ == transport_->rank()) {
    who = "this rank (" + std::to_string(culprit_) + "): ";
  } else if (culprit_ >= 0 && !abort_reason_.starts_with(rank + ' ') &&
             !abort_reason_.starts_with(rank + ':')) {  // a transport names the rank itself
    who = rank + ": ";
  }
  const Status status = Status::Aborted(who + abort_reason_);
  {
    std::lock_guard lock(shared_mutex_);
    health_ = status;
  }
  DAD_LOG(Error) << "giving up: " << status.message();
  if (!abort_heard_) {
    ByteWriter out;
    out.Value(static_cast<int32_t>(culprit_));
    out.Text(abort_reason_);
    for (int peer = 0; peer < transport_->size(); ++peer) {
      if (peer != culprit_ && peers_.Alive(peer)) {
        SendControl(peer, MessageKind::kAbort, out.bytes());
      }
    }
    (void)transport_->Flush(kAbortFlush);
  }
  transport_->Close();
  FailAll(status);
}

void Worker::FailAll(const Status& status) {
  receive_table_.Clear();
  for (auto& [id, slot] : lanes_) {
    if (slot.device) slot.device->Stop();
    slot.lane->FailAll(status);
  }
  for (const auto& request : stager_.TakeAll()) request->Complete(status);
  for (auto* join : {&join_, &join_after_staging_}) {
    if (*join) std::exchange(*join, nullptr)->Complete(status);
  }
}

void Worker::BeginShutdown() {
  shutting_down_ = true;
  if (!aborted_) {
    for (int peer = 0; peer < transport_->size(); ++peer) {
      if (peers_.Alive(peer)) SendControl(peer, MessageKind::kGoodbye);
    }
  }
  shutdown_deadline_ = Clock::now() + kGoodbyePatience;
  progress_at_shutdown_ = Progress();
  for (auto& [id, slot] : lanes_) {
    if (slot.device) slot.device->Stop();
  }
}

bool Worker::ShutdownDone(Clock::time_point now) {
  if (aborted_) return true;
  bool all_gone = true;
  for (int peer = 0; peer < transport_->size(); ++peer) {
    all_gone = all_gone && !peers_.Alive(peer);
  }
  if (all_gone || now < shutdown_deadline_) return all_gone;
  // On a slow line our goodbye may still be queued behind data.
  std::vector<int64_t> progress = Progress();
  if (progress == progress_at_shutdown_) return true;
  progress_at_shutdown_ = std::move(progress);
  shutdown_deadline_ = now + kGoodbyePatience;
  return false;
}

}  // namespace dad
