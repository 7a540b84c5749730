#include "runtime/device/stager.h"

#include <utility>

#include "dad/views.h"
#include "device/events.h"

namespace dad {
namespace {

constexpr size_t kAlignment = 256;

size_t Padded(size_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

TensorView OnHost(const TensorView& device, std::byte* memory) {
  TensorView host = device;
  host.data = memory;
  host.device = DeviceType::kCpu;
  host.device_index = -1;
  host.ready_event = nullptr;
  return host;
}

bool HasDeviceMemory(const TensorView& view) {
  return view.device == DeviceType::kCuda && view.data != nullptr && view.num_bytes() > 0;
}

}  // namespace

// The host memory of a request, and the device memory that it belongs to.
struct StagedTensors {
  struct Back {
    TensorView device;
    const void* host;
  };
  std::vector<std::shared_ptr<std::byte>> memory;
  std::vector<Back> back;
  // Outputs whose shape was known only at the end. Return asks the framework for them.
  struct Late {
    int tensor;
    TensorView host;
  };
  std::vector<Late> late;
  OutputAllocator allocate;  // the framework's
};

Stager::~Stager() {
  for (auto& [device, streams] : streams_) {
    const CudaDeviceGuard guard(*cuda_, device);
    (void)cuda_->StreamDestroy(streams.to_host);
    (void)cuda_->StreamDestroy(streams.to_device);
  }
}

Status Stager::Load() {
  if (cuda_ != nullptr) return Status::Ok();
  const Result<const CudaApi*> cuda = ProcessCuda();
  if (!cuda.ok()) return cuda.status();
  cuda_ = cuda.value();
  pool_ = std::make_unique<PinnedPool>(*cuda_);
  return Status::Ok();
}

// Two, so that results do not queue behind gradients that are not ready yet.
Result<Stager::Streams> Stager::StreamsOf(int device) {
  if (const auto found = streams_.find(device); found != streams_.end()) return found->second;
  Result<CudaStream> to_host = NewStream(*cuda_);
  if (!to_host.ok()) return to_host.status();
  Result<CudaStream> to_device = NewStream(*cuda_);
  if (!to_device.ok()) {
    (void)cuda_->StreamDestroy(to_host.value());
    return to_device.status();
  }
  return streams_[device] = {to_host.value(), to_device.value()};
}

Status Stager::Bring(const std::shared_ptr<RequestState>& request) {
  DAD_RETURN_IF_ERROR(Load());
  const int device = request->device_index;
  const CudaDeviceGuard guard(*cuda_, device);
  const Result<Streams> streams = StreamsOf(device);
  if (!streams.ok()) return streams.status();

  std::vector<Contribution> on_host = request->request.tensors;
  size_t num_bytes = 0;
  for (Contribution& tensor : on_host) {
    ForEachView(tensor, [&](const TensorView& view, bool) {
      if (HasDeviceMemory(view)) num_bytes += Padded(view.num_bytes());
    });
  }
  auto staged = std::make_shared<StagedTensors>();
  Result<std::shared_ptr<std::byte>> memory = pool_->Take(num_bytes);
  if (!memory.ok()) return memory.status();
  std::byte* next = memory.value().get();
  staged->memory.push_back(std::move(memory).value());

  Status status;
  for (Contribution& tensor : on_host) {
    ForEachView(tensor, [&](TensorView& view, bool is_output) {
      if (view.device != DeviceType::kCuda) return;
      if (!status.ok() || !HasDeviceMemory(view)) {
        view = OnHost(view, static_cast<std::byte*>(view.data));
        return;
      }
      std::byte* const place = std::exchange(next, next + Padded(view.num_bytes()));
      if (is_output) {
        staged->back.push_back({view, place});
      } else {
        if (view.ready_event != nullptr) {
          status = cuda_->Check(cuda_->StreamWaitEvent(streams.value().to_host,
                                                       static_cast<CudaEvent>(view.ready_event), 0),
                                "cudaStreamWaitEvent");
        }
        if (status.ok()) {
          status = cuda_->Check(cuda_->MemcpyAsync(place, view.data, view.num_bytes(),
                                                   kCudaMemcpyDefault, streams.value().to_host),
                                "cudaMemcpyAsync");
        }
      }
      view = OnHost(view, place);
    });
  }
  // Do this also when a copy failed: the earlier copies are under way.
  Result<DeviceEvent> event = RecordNewEvent(*cuda_, streams.value().to_host);
  if (event.ok()) Keep(device, event.value(), staged->memory.front());
  if (!status.ok()) return status;
  if (!event.ok()) return event.status();

  if (request->request.allocate) {
    staged->allocate = std::move(request->request.allocate);
    request->request.allocate = [pool = pool_.get(), weak = std::weak_ptr(staged)](
                                    int tensor, DType dtype,
                                    const Shape& shape) -> Result<TensorView> {
      const std::shared_ptr<StagedTensors> mine = weak.lock();
      if (mine == nullptr) return Status::Internal("an output for a request that is gone");
      TensorView view;
      view.dtype = dtype;
      view.shape = shape;
      Result<std::shared_ptr<std::byte>> block = pool->Take(view.num_bytes());
      if (!block.ok()) return block.status();
      view.data = block.value().get();
      mine->memory.push_back(std::move(block).value());
      mine->late.push_back({tensor, view});
      return view;
    };
  }
  request->request.tensors = std::move(on_host);
  request->staged = std::move(staged);
  under_way_.push_back({request, std::move(event).value()});
  return Status::Ok();
}

std::vector<std::shared_ptr<RequestState>> Stager::Arrived() {
  std::vector<std::shared_ptr<RequestState>> arrived;
  while (!under_way_.empty()) {
    UnderWay& oldest = under_way_.front();
    const Result<bool> passed = EventPassed(oldest.request->device_index, oldest.event);
    if (passed.ok() && !passed.value()) break;
    if (!passed.ok()) oldest.request->first_error = passed.status();
    arrived.push_back(std::move(oldest.request));
    under_way_.pop_front();
  }
  return arrived;
}

Status Stager::Return(RequestState& request) {
  const std::shared_ptr<StagedTensors> staged = request.staged;
  const int device = request.device_index;
  const CudaDeviceGuard guard(*cuda_, device);
  const Result<Streams> streams = StreamsOf(device);
  if (!streams.ok()) return streams.status();
  for (const StagedTensors::Late& late : staged->late) {
    const Result<TensorView> output =
        staged->allocate(late.tensor, late.host.dtype, late.host.shape);
    if (!output.ok()) return output.status();
    if (output.value().device != DeviceType::kCuda) {
      return Status::InvalidArgument("\"" + request.meta.name + "\": an output on the host");
    }
    staged->back.push_back({output.value(), late.host.data});
  }
  for (const StagedTensors::Back& back : staged->back) {
    if (back.device.num_bytes() == 0) continue;
    if (back.device.ready_event != nullptr) {
      DAD_RETURN_IF_ERROR(
          cuda_->Check(cuda_->StreamWaitEvent(streams.value().to_device,
                                              static_cast<CudaEvent>(back.device.ready_event), 0),
                       "cudaStreamWaitEvent"));
    }
    DAD_RETURN_IF_ERROR(
        cuda_->Check(cuda_->MemcpyAsync(back.device.data, back.host, back.device.num_bytes(),
                                        kCudaMemcpyDefault, streams.value().to_device),
                     "cudaMemcpyAsync"));
  }
  Result<DeviceEvent> event = RecordNewEvent(*cuda_, streams.value().to_device);
  if (!event.ok()) return event.status();
  for (auto& block : staged->memory) Keep(device, event.value(), std::move(block));
  request.done = std::move(event).value();
  return Status::Ok();
}

void Stager::Keep(int device, const DeviceEvent& event, std::shared_ptr<std::byte> block) {
  while (!kept_.empty()) {
    const Result<bool> passed = EventPassed(kept_.front().device, kept_.front().event);
    if (passed.ok() && !passed.value()) break;
    kept_.pop_front();
  }
  kept_.push_back({device, event, std::move(block)});
}

std::vector<std::shared_ptr<RequestState>> Stager::TakeAll() {
  std::vector<std::shared_ptr<RequestState>> all;
  for (UnderWay& each : std::exchange(under_way_, {})) all.push_back(std::move(each.request));
  return all;
}

}  // namespace dad
