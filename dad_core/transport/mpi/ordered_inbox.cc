#include "transport/mpi/ordered_inbox.h"

#include <utility>

namespace dad::mpi_transport {
namespace {

// Whether a peer lives or has given up is worth knowing while a large payload is stuck.
bool Overtakes(MessageKind kind) {
  switch (kind) {
    case MessageKind::kPing:
    case MessageKind::kPong:
    case MessageKind::kAbort:
    case MessageKind::kAsk:
    case MessageKind::kState: return true;
    default: return false;
  }
}

}  // namespace

void OrderedInbox::Add(const MessageHeader& header, AlignedBuffer payload) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!end_.ok()) return;
  if (Overtakes(header.kind)) {
    lock.unlock();
    return receiver_->OnMessage(peer_, header, std::move(payload));
  }
  queue_.push_back({header, std::move(payload), true, Status::Ok()});
  HandOut(std::move(lock));
}

OrderedInbox::Entry* OrderedInbox::Expect(const MessageHeader& header, AlignedBuffer payload) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!end_.ok()) return nullptr;
  queue_.push_back({header, std::move(payload), false, Status::Ok()});
  return &queue_.back();
}

void OrderedInbox::Complete(Entry* entry) {
  std::unique_lock<std::mutex> lock(mutex_);
  entry->complete = true;
  HandOut(std::move(lock));
}

void OrderedInbox::End(Status why) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!end_.ok()) return;
  end_ = why;
  queue_.push_back({{}, {}, true, std::move(why)});
  HandOut(std::move(lock));
}

void OrderedInbox::Forget() {
  std::lock_guard<std::mutex> lock(mutex_);
  ForgetLocked();
}

void OrderedInbox::ForgetLocked() {
  if (!queue_.empty()) new std::deque<Entry>(std::move(queue_));
  queue_.clear();
}

void OrderedInbox::Break(const Status& why) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!end_.ok() && queue_.empty()) return;  // it was handed out
  ForgetLocked();
  if (end_.ok()) end_ = why;
  queue_.push_back({{}, {}, true, end_});
  HandOut(std::move(lock));
}

bool OrderedInbox::idle() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !handing_out_;
}

bool OrderedInbox::ended() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !end_.ok();
}

void OrderedInbox::HandOut(std::unique_lock<std::mutex> lock) {
  if (handing_out_) return;  // the thread that does it will come to the new entries
  handing_out_ = true;
  while (!queue_.empty() && queue_.front().complete) {
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (entry.end.ok()) {
      receiver_->OnMessage(peer_, entry.header, std::move(entry.payload));
    } else {
      receiver_->OnEnd(peer_, entry.end);
    }
    lock.lock();
  }
  handing_out_ = false;
}

}  // namespace dad::mpi_transport
