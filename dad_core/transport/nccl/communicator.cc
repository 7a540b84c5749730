#include "transport/nccl/communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace dad::nccl {
namespace {

// Pause between two questions to NCCL whether a call has completed. Usually the first answer is
// yes.
constexpr std::chrono::microseconds kAskAgain{100};

}  // namespace

Communicator::Communicator(std::shared_ptr<const Libraries> libraries, int device,
                           std::vector<int> members, int rank)
    : libraries_(std::move(libraries)),
      device_(device),
      members_(std::move(members)),
      rank_(rank) {}

Communicator::~Communicator() { Close(Millis(0)); }

Status Communicator::Start(const UniqueId& id, Millis timeout) {
  const auto deadline = Clock::now() + timeout;
  const CudaApi& cuda = libraries_->cuda;
  const CudaDeviceGuard guard(cuda, device_);
  int least = 0;
  int greatest = 0;
  DAD_RETURN_IF_ERROR(cuda.Check(cuda.DeviceGetStreamPriorityRange(&least, &greatest),
                                 "cudaDeviceGetStreamPriorityRange"));
  std::unique_lock<std::mutex> lock(mutex_);
  if (!broken_.ok()) return broken_;
  // Has priority over the framework's kernels, and does not wait for the default stream.
  DAD_RETURN_IF_ERROR(
      cuda.Check(cuda.StreamCreateWithPriority(&stream_, kCudaStreamNonBlocking, greatest),
                 "cudaStreamCreateWithPriority"));
  Config config;
  const ResultCode code = libraries_->nccl.CommInitRankConfig(&comm_, size(), id, rank_, &config);
  return Settle(code, "ncclCommInitRankConfig", deadline, lock);
}

bool Communicator::Has(int world_rank) const {
  return std::find(members_.begin(), members_.end(), world_rank) != members_.end();
}

Status Communicator::Settle(ResultCode code, const char* call, Clock::time_point deadline,
                            std::unique_lock<std::mutex>& lock) {
  while (code == kInProgress) {
    if (!broken_.ok()) return broken_;
    if (closed_) return Status::Aborted("the communicator was closed");
    ResultCode state = kSuccess;
    code = libraries_->nccl.CommGetAsyncError(comm_, &state);
    if (code == kSuccess) code = state;
    if (code != kInProgress) break;
    if (Clock::now() >= deadline) {
      return BreakLocked(
          Status::Timeout(std::string(call) + ": not all members have come in the time given"));
    }
    lock.unlock();
    std::this_thread::sleep_for(kAskAgain);
    lock.lock();
  }
  if (!broken_.ok()) return broken_;
  return code == kSuccess ? Status::Ok() : BreakLocked(NcclError(code, call));
}

Result<std::shared_ptr<Communicator::Operation>> Communicator::Submit(
    std::string what, std::span<const TensorView> views, bool grouped, const Enqueue& enqueue,
    Millis timeout) {
  for (const TensorView& view : views) {
    if (view.device != DeviceType::kCuda || view.device_index != device_) {
      return Status::InvalidArgument(what + ": a tensor is not on CUDA device " +
                                     std::to_string(device_));
    }
  }
  const CudaApi& cuda = libraries_->cuda;
  const NcclApi& nccl = libraries_->nccl;
  const auto deadline = Clock::now() + timeout;
  const std::lock_guard<std::mutex> one_at_a_time(submit_mutex_);
  const CudaDeviceGuard guard(cuda, device_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!broken_.ok()) return broken_;
  if (closed_) return Status::Aborted("the communicator was closed");

  CudaEvent event = nullptr;
  DAD_RETURN_IF_ERROR(cuda.Check(cuda.EventCreateWithFlags(&event, kCudaEventDisableTiming),
                                 "cudaEventCreateWithFlags"));
  auto operation = std::make_shared<Operation>(libraries_, event, std::move(what), deadline);
  for (const TensorView& view : views) {
    if (view.ready_event == nullptr) continue;
    const Status waits =
        cuda.Check(cuda.StreamWaitEvent(stream_, static_cast<CudaEvent>(view.ready_event), 0),
                   "cudaStreamWaitEvent");
    if (!waits.ok()) return BreakLocked(waits);
  }
  ResultCode code = grouped ? nccl.GroupStart() : kSuccess;
  if (code == kSuccess) {
    code = enqueue(comm_, stream_);
    // A group that was started is ended whatever happened inside.
    const ResultCode ended = grouped ? nccl.GroupEnd() : kSuccess;
    if (code == kSuccess || code == kInProgress) code = grouped ? ended : code;
  }
  DAD_RETURN_IF_ERROR(Settle(code, operation->what_.c_str(), deadline, lock));
  const Status recorded = cuda.Check(cuda.EventRecord(event, stream_), "cudaEventRecord");
  if (!recorded.ok()) return BreakLocked(recorded);
  under_way_.push_back(operation);
  return operation;
}

Result<bool> Communicator::Poll(Operation& operation) {
  const CudaDeviceGuard guard(libraries_->cuda, device_);
  const std::lock_guard<std::mutex> lock(mutex_);
  return PollLocked(operation);
}

Result<bool> Communicator::PollLocked(Operation& operation) {
  if (operation.finished_) return true;
  if (!broken_.ok()) return broken_;
  if (closed_) return Status::Aborted(operation.what_ + ": the communicator was closed");
  const CudaError error = libraries_->cuda.EventQuery(operation.event_);
  // Do this even if the event has occurred: the kernels of a communicator with an error end early.
  ResultCode state = kSuccess;
  ResultCode code = libraries_->nccl.CommGetAsyncError(comm_, &state);
  if (code == kSuccess) code = state;
  if (code != kSuccess && code != kInProgress) {
    return BreakLocked(NcclError(code, operation.what_.c_str()));
  }
  if (error == kCudaSuccess) {
    operation.finished_ = true;
    return true;
  }
  if (error != kCudaNotReady) {
    return BreakLocked(libraries_->cuda.Check(error, operation.what_.c_str()));
  }
  if (Clock::now() >= operation.deadline_) {
    return BreakLocked(Status::Timeout(operation.what_ + ": not finished in the time given"));
  }
  return false;
}

bool Communicator::Watch() {
  const CudaDeviceGuard guard(libraries_->cuda, device_);
  const std::lock_guard<std::mutex> lock(mutex_);
  // The stream executes them in turn: the first unfinished one ends the check.
  while (!under_way_.empty()) {
    const Result<bool> done = PollLocked(*under_way_.front());
    if (!done.ok()) break;
    if (!done.value()) return true;
    under_way_.pop_front();
  }
  under_way_.clear();
  return false;
}

void Communicator::Break(const Status& why) {
  const CudaDeviceGuard guard(libraries_->cuda, device_);
  const std::lock_guard<std::mutex> lock(mutex_);
  (void)BreakLocked(why);
}

Status Communicator::BreakLocked(const Status& why) {
  if (!broken_.ok() || closed_) return broken_.ok() ? why : broken_;
  broken_ = why;
  if (comm_ != nullptr) (void)libraries_->nccl.CommAbort(std::exchange(comm_, nullptr));
  return broken_;
}

Status Communicator::status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (broken_.ok() && closed_) return Status::Aborted("the communicator was closed");
  return broken_;
}

// The communicator is destroyed before the stream on which its kernels run.
void Communicator::Close(Millis grace) {
  const auto deadline = Clock::now() + grace;
  while (Watch() && Clock::now() < deadline) std::this_thread::sleep_for(kAskAgain);
  const std::lock_guard<std::mutex> one_at_a_time(submit_mutex_);
  const CudaDeviceGuard guard(libraries_->cuda, device_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) return;
  if (comm_ != nullptr && !under_way_.empty()) {
    (void)BreakLocked(Status::Aborted("closed with work under way"));
  }
  if (comm_ != nullptr) {
    const ResultCode code = libraries_->nccl.CommFinalize(comm_);
    // Do not wait for a member that has not reached its end by now.
    (void)Settle(code, "ncclCommFinalize", std::max(deadline, Clock::now() + Millis(100)), lock);
  }
  if (comm_ != nullptr) (void)libraries_->nccl.CommDestroy(std::exchange(comm_, nullptr));
  if (stream_ != nullptr) (void)libraries_->cuda.StreamDestroy(std::exchange(stream_, nullptr));
  closed_ = true;
  under_way_.clear();
}

Status Communicator::NcclError(ResultCode code, const char* call) const {
  return Status::Aborted(std::string(call) + ": NCCL: " + libraries_->nccl.GetErrorString(code));
}

}  // namespace dad::nccl
