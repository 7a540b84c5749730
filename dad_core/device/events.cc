#include "device/events.h"

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "util/mutex.h"

namespace dad {
namespace {

struct Kept {
  int device;
  DeviceEvent event;
  std::shared_ptr<void> what;
};

// Leaked on purpose: the last thread to touch it may end after static destructors have run.
struct Keeper {
  Mutex mutex;
  std::deque<Kept> kept GUARDED_BY(mutex);
};
Keeper& TheKeeper() {
  static auto* keeper = new Keeper;
  return *keeper;
}

}  // namespace

Result<DeviceEvent> RecordNewEvent(const CudaApi& cuda, CudaStream stream) {
  CudaEvent raw = nullptr;
  DAD_RETURN_IF_ERROR(cuda.Check(cuda.EventCreateWithFlags(&raw, kCudaEventDisableTiming),
                                 "cudaEventCreateWithFlags"));
  DeviceEvent event(raw,
                    [&cuda](void* gone) { (void)cuda.EventDestroy(static_cast<CudaEvent>(gone)); });
  DAD_RETURN_IF_ERROR(cuda.Check(cuda.EventRecord(raw, stream), "cudaEventRecord"));
  return event;
}

Result<CudaStream> NewStream(const CudaApi& cuda) {
  int least = 0;
  int greatest = 0;
  DAD_RETURN_IF_ERROR(cuda.Check(cuda.DeviceGetStreamPriorityRange(&least, &greatest),
                                 "cudaDeviceGetStreamPriorityRange"));
  CudaStream stream = nullptr;
  DAD_RETURN_IF_ERROR(
      cuda.Check(cuda.StreamCreateWithPriority(&stream, kCudaStreamNonBlocking, greatest),
                 "cudaStreamCreateWithPriority"));
  return stream;
}

Result<DeviceEvent> RecordEvent(int device, void* stream) {
  const Result<const CudaApi*> cuda = ProcessCuda();
  if (!cuda.ok()) return cuda.status();
  const CudaDeviceGuard guard(*cuda.value(), device);
  return RecordNewEvent(*cuda.value(), static_cast<CudaStream>(stream));
}

Status StreamWaits(int device, void* stream, const DeviceEvent& event) {
  if (event == nullptr) return Status::Ok();
  const Result<const CudaApi*> cuda = ProcessCuda();
  if (!cuda.ok()) return cuda.status();
  const CudaDeviceGuard guard(*cuda.value(), device);
  return cuda.value()->Check(
      cuda.value()->StreamWaitEvent(static_cast<CudaStream>(stream), AsEvent(event), 0),
      "cudaStreamWaitEvent");
}

Result<bool> EventPassed(int device, const DeviceEvent& event) {
  if (event == nullptr) return true;
  const Result<const CudaApi*> cuda = ProcessCuda();
  if (!cuda.ok()) return cuda.status();
  const CudaDeviceGuard guard(*cuda.value(), device);
  const CudaError error = cuda.value()->EventQuery(AsEvent(event));
  if (error == kCudaNotReady) {
    (void)cuda.value()->GetLastError();
    return false;
  }
  DAD_RETURN_IF_ERROR(cuda.value()->Check(error, "cudaEventQuery"));
  return true;
}

Status WaitForEvent(int device, const DeviceEvent& event, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::chrono::microseconds pause{10};
  for (;;) {
    const Result<bool> passed = EventPassed(device, event);
    if (!passed.ok()) return passed.status();
    if (passed.value()) return Status::Ok();
    if (std::chrono::steady_clock::now() >= deadline) {
      return Status::Timeout("the device has not finished in the time given");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(1000));
  }
}

void KeepUntil(int device, DeviceEvent event, std::shared_ptr<void> what) {
  ReleasePassed();
  if (event == nullptr || what == nullptr) return;
  Keeper& keeper = TheKeeper();
  MutexLock lock(keeper.mutex);
  keeper.kept.push_back({device, std::move(event), std::move(what)});
}

void ReleasePassed() {
  std::vector<Kept> passed;  // released without the lock: that may take a framework's
  Keeper& keeper = TheKeeper();
  MutexLock lock(keeper.mutex);
  // All of them: what one device is not through with does not hold up another's.
  std::erase_if(keeper.kept, [&](Kept& kept) {
    const Result<bool> done = EventPassed(kept.device, kept.event);
    // An error: the device is lost, and nothing will use the memory any more.
    if (done.ok() && !done.value()) return false;
    passed.push_back(std::move(kept));
    return true;
  });
}

}  // namespace dad
