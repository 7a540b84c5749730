// Requests of device tensors: from device to device, computed on it, or by way of the host.
#include <chrono>
#include <utility>

#include "exchange/device/bench.h"
#include "runtime/lane/validate.h"
#include "runtime/solo.h"
#include "runtime/worker.h"
#include "transport/device_collectives.h"
#include "util/log.h"

namespace dad {
namespace {

std::chrono::milliseconds Millis(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

}  // namespace

// From device to device if the transport can, else by way of the host.
void Worker::SubmitFromDevice(Lane& lane, const std::shared_ptr<RequestState>& request) {
  const auto on_another = [&](int mine) {
    request->Complete(Status::InvalidArgument(
        "\"" + request->meta.name + "\": the tensor is on device " +
        std::to_string(request->device_index) + ", this process communicates from device " +
        std::to_string(mine) + ", that of its local rank"));
  };
  if (lane.TakesOnDevice(request->meta)) {
    const int mine = transport_->device_collectives()->device();
    if (request->device_index != mine) return on_another(mine);
    return lane.Submit(request);
  }
  const bool by_method = !request->meta.method.none();
  if (by_method && lane.ComputesOnDevice(*request)) return lane.Submit(request);
  if (by_method && lane.MustComputeOnDevice(*request)) {
    return on_another(device_methods_.bench->device());
  }
  if (by_method) {
    SayOnce(said_methods_, "Methods of CUDA tensors are computed on the host", device_methods_.why);
  } else {
    SayOnce(said_staged_, "CUDA tensors go by way of the host", why_staged_);
  }
  if (const Status status = stager_.Bring(request); !status.ok()) {
    request->Complete(Status(status.code(), "\"" + request->meta.name + "\": " + status.message()));
  }
}

void Worker::SayOnce(bool& said, const char* what, const std::string& why) {
  if (why.empty() || std::exchange(said, true)) return;
  DAD_LOG(Warning) << what << ": " << why;
}

void Worker::SendHeld() {
  for (auto& [id, slot] : lanes_) {
    if (slot.lane->executor().holds()) slot.lane->executor().SendHeld();
  }
}

void Worker::TakeStaged() {
  for (const auto& request : stager_.Arrived()) {
    Lane* lane = FindLane(request->request.process_set);
    Status status = request->first_error;
    if (status.ok() && lane == nullptr) {
      status = Status::InvalidArgument("\"" + request->meta.name +
                                       "\": its process set has been removed");
    }
    // Checks that could not be made on the device: the indices of rows.
    if (status.ok()) {
      status = Validate(request->request, transport_->rank(), lane->ranks(), transport_->size());
    }
    if (!status.ok()) {
      request->Complete(status);
    } else if (lane->ranks().size() > 1) {
      lane->Submit(request);
    } else {
      request->first_error = RunAlone(*request);
      Completed(request);
    }
  }
  if (!stager_.busy() && join_after_staging_) {
    HandleJoin(std::exchange(join_after_staging_, nullptr));
  }
}

void Worker::RunOnDevice(int lane, DeviceTask task) {
  LaneSlot& slot = lanes_.at(lane);
  if (slot.device == nullptr) {
    slot.device = std::make_unique<DeviceLane>(
        static_cast<uint32_t>(lane), slot.lane->ranks(), transport_->device_collectives(),
        Millis(options_.start_timeout_seconds), Millis(options_.device_timeout_seconds),
        [this, lane](DeviceOutcome outcome) {
          inbox_->Post(CallEvent{[this, lane, outcome = std::move(outcome)] {
            Lane* found = FindLane(lane);
            if (found != nullptr && !aborted_) found->OnDevice(outcome);
          }});
        },
        [this](const Status& why) {
          inbox_->Post(CallEvent{[this, why] { Abort(-1, why.message()); }});
        });
  }
  slot.device->Put(std::move(task));
}

}  // namespace dad
