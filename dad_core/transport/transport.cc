#include "transport/transport.h"

namespace dad {

void Transport::SetSink(MessageSink* sink) {
  std::lock_guard<std::mutex> lock(sink_mutex_);
  sink_ = sink;
  if (sink == nullptr) return;
  for (Early& early : early_) {
    if (early.lost.ok()) {
      sink->Deliver(early.peer, early.header, std::move(early.payload));
    } else {
      sink->PeerLost(early.peer, early.lost);
    }
  }
  early_.clear();
}

std::byte* Transport::ReserveFor(int peer, const MessageHeader& header) {
  if (header.kind == MessageKind::kCollective) return nullptr;
  std::lock_guard<std::mutex> lock(sink_mutex_);
  return sink_ == nullptr ? nullptr : sink_->Reserve(peer, header);
}

void Transport::DeliverMessage(int peer, const MessageHeader& header, AlignedBuffer payload) {
  if (header.kind == MessageKind::kCollective) {
    {
      std::lock_guard<std::mutex> lock(mailbox_mutex_);
      mailbox_[{peer, header.batch}].push_back(std::move(payload));
    }
    mailbox_changed_.notify_all();
    return;
  }
  std::lock_guard<std::mutex> lock(sink_mutex_);
  if (header.kind == MessageKind::kGoodbye) ended_.insert(peer);
  if (sink_ == nullptr) {
    early_.push_back({peer, header, std::move(payload), Status::Ok()});
  } else {
    sink_->Deliver(peer, header, std::move(payload));
  }
}

void Transport::ReportLost(int peer, Status why) {
  {
    std::lock_guard<std::mutex> lock(mailbox_mutex_);
    lost_.emplace(peer, why);
  }
  mailbox_changed_.notify_all();

  std::lock_guard<std::mutex> lock(sink_mutex_);
  if (!ended_.insert(peer).second) return;
  if (sink_ == nullptr) {
    early_.push_back({peer, {}, {}, std::move(why)});
  } else {
    sink_->PeerLost(peer, why);
  }
}

}  // namespace dad
