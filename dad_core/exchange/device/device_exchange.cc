#include "exchange/device/device_exchange.h"

#include <cstring>

namespace dad {

DeviceExchange::~DeviceExchange() {
  pinned_.ReleaseAfter(bench_, event_);
  sent_.ReleaseAfter(bench_, event_);
}

Status DeviceExchange::Begin(const StepInput& input, const Group& group) {
  group_ = group;
  step_ = input;
  refusal_.Clear();
  sent_.ReleaseAfter(bench_, std::exchange(event_, nullptr));
  Reset();
  by_host_ = on_host_ != nullptr && GoesByHost(input.mine);
  if (by_host_) {
    LeaveToHost();
    return on_host_->Begin(input, group);
  }
  if (!Computes()) return Status::Ok();
  DAD_RETURN_IF_ERROR(bench_.Open());
  return OrRefuse(Compute());
}

Status DeviceExchange::Send(int round, int peer, GatherBuffer& out) {
  // An owner tells of a refusal also where its own part goes by way of the host.
  if (by_host_ && !refusal_.there()) return on_host_->Send(round, peer, out);
  return SendShare(round, peer, out);
}

Status DeviceExchange::Receive(int round, std::span<const ByteSpan> shares) {
  const Result<bool> refused = AnyRefused(round, shares);
  if (!refused.ok()) return refused.status();
  if (refused.value()) return Status::Ok();
  return by_host_ ? on_host_->Receive(round, shares) : ReceiveShares(round, shares);
}

Status DeviceExchange::Finish() {
  if (by_host_) return refusal_.there() ? refusal_.status(spec_) : on_host_->Finish();
  if (!Computes()) return Status::Ok();
  const Status delivered = refusal_.there() ? refusal_.status(spec_) : Deliver();
  const Status recorded = Record();
  Release();
  return delivered.ok() ? recorded : delivered;
}

void DeviceExchange::Cancel() {
  if (by_host_) return on_host_->Cancel();
  Release();
}

Result<bool> DeviceExchange::AnyRefused(int, std::span<const ByteSpan> shares) {
  const Refusal mine = std::exchange(refusal_, {});
  if (step_.mine == nullptr) return false;
  for (int r = 0; r < group_.size; ++r) {
    if (r != group_.rank) {
      refusal_.Read(shares[static_cast<size_t>(r)]);
    } else if (mine.there()) {
      refusal_.Note(mine.why());
    }
  }
  return refusal_.there();
}

Status DeviceExchange::OrRefuse(const Status& status) {
  if (!Refusal::Is(status)) return status;
  DAD_RETURN_IF_ERROR(Record());
  Refuse(status.message());
  return Status::Ok();
}

Status DeviceExchange::CheckOneLayer() const {
  const size_t layers = step_.mine->layers.size();
  if (layers == 1) return Status::Ok();
  return Status::InvalidArgument("\"" + spec_.name + "\": expected one layer, got " +
                                 std::to_string(layers));
}

Status DeviceExchange::Malformed(int rank, const std::string& what) const {
  return Status::InvalidArgument("\"" + spec_.name + "\": rank " + std::to_string(rank) + " sent " +
                                 what);
}

Status DeviceExchange::Record() {
  Result<DeviceEvent> event = bench_.Record();
  if (!event.ok()) return event.status();
  event_ = std::move(event).value();
  return Status::Ok();
}

Status DeviceExchange::Bring(ByteSpan bytes, void* to) {
  const Result<std::byte*> pinned = pinned_.Take(bench_, bytes.size());
  if (!pinned.ok()) return pinned.status();
  std::memcpy(pinned.value(), bytes.data(), bytes.size());
  return bench_.Copy(to, pinned.value(), bytes.size());
}

// Device memory goes back at once, page-locked memory when the device is through.
void DeviceExchange::Release() {
  pinned_.ReleaseAfter(bench_, event_);
  arena_.Release();
  Drop();
}

}  // namespace dad
