#include "transport/local/local_transport.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

namespace dad::local {
namespace {

bool Later(const Parcel& a, const Parcel& b) {
  return std::tie(a.due, a.order) > std::tie(b.due, b.order);
}

int64_t WireBytes(const MessageHeader& header) {
  return static_cast<int64_t>(sizeof header + header.payload_bytes);
}

AlignedBuffer Flatten(const GatherBuffer& payload) {
  AlignedBuffer flat(payload.size());
  std::byte* at = flat.data();
  for (ByteSpan piece : payload.Pieces()) {
    std::memcpy(at, piece.data(), piece.size());
    at += piece.size();
  }
  return flat;
}

}  // namespace

LocalTransport::LocalTransport(int rank, std::shared_ptr<Hub> hub)
    : Transport(rank, hub->size()), hub_(std::move(hub)), thread_([this] { Run(); }) {
  hub_->Attach(rank, this);
}

LocalTransport::~LocalTransport() { Close(); }

TransportCounters LocalTransport::counters() const {
  return {bytes_sent_, bytes_received_, messages_sent_};
}

void LocalTransport::Send(int peer, MessageHeader header, GatherBuffer payload,
                          std::shared_ptr<void> keep) {
  header.payload_bytes = payload.size();
  if (!hub_->Send(rank(), peer, header, Flatten(payload))) return;
  keep.reset();  // only the copy travels
  bytes_sent_ += WireBytes(header);
  ++messages_sent_;
}

Status LocalTransport::Flush(Millis) { return Status::Ok(); }

void LocalTransport::Close() {
  std::lock_guard<std::mutex> one_at_a_time(close_mutex_);
  hub_->Detach(rank());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void LocalTransport::Put(Parcel parcel) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    heap_.push_back(std::move(parcel));
    std::push_heap(heap_.begin(), heap_.end(), Later);
  }
  changed_.notify_all();
}

void LocalTransport::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_) {
    if (heap_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const auto due = heap_.front().due;
    if (Clock::now() < due) {
      changed_.wait_until(lock, due);
      continue;
    }
    std::pop_heap(heap_.begin(), heap_.end(), Later);
    Parcel parcel = std::move(heap_.back());
    heap_.pop_back();
    lock.unlock();
    HandOut(std::move(parcel));
    lock.lock();
  }
}

void LocalTransport::HandOut(Parcel parcel) {
  if (parcel.lost) {
    ReportLost(parcel.from,
               Status::Aborted("rank " + std::to_string(parcel.from) + " closed the connection"));
    return;
  }
  bytes_received_ += WireBytes(parcel.header);
  if (parcel.payload.size() > 0) {
    if (std::byte* place = ReserveFor(parcel.from, parcel.header); place != nullptr) {
      std::memcpy(place, parcel.payload.data(), parcel.payload.size());
      parcel.payload = AlignedBuffer();
    }
  }
  DeliverMessage(parcel.from, parcel.header, std::move(parcel.payload));
}

}  // namespace dad::local
