#include "runtime/device/device_lane.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "device/events.h"
#include "exchange/share/shares.h"

namespace dad {
namespace {

// Pause between two checks of work that is on the device.
constexpr std::chrono::milliseconds kLook{20};
constexpr size_t kAlignment = 256;  // of a tensor in the shared buffer; a multiple of any element

size_t Padded(size_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

double Scale(const TensorSpec& spec) { return spec.prescale * spec.postscale; }

size_t NumBytes(const TensorSpec& spec) {
  return static_cast<size_t>(NumElements(spec.shape)) * SizeOf(spec.dtype);
}

const Contribution& Mine(const DeviceTask::Part& part) {
  return part.request->request.tensors[static_cast<size_t>(part.tensor)];
}

// A joined rank contributes zeros, which must not change the result.
Status CheckZerosCount(const TensorSpec& spec) {
  if (spec.op == ReduceOp::kSum || spec.op == ReduceOp::kAverage) return Status::Ok();
  return Status::InvalidArgument("\"" + spec.name + "\": " + Name(spec.op) +
                                 " on a device, while some rank has joined, which has no value"
                                 " for it; Sum and Average are possible");
}

// As every member sees it: all know what each member contributed.
bool AllBringTheSame(const DeviceTask::Part& part, bool some_absent) {
  const std::vector<DeviceTurn::Rows>& rows = part.turn.rows;
  return !some_absent && std::all_of(rows.begin(), rows.end(), [&](const DeviceTurn::Rows& each) {
    return each.receive_count == rows[0].receive_count;
  });
}

}  // namespace

DeviceLane::DeviceLane(uint32_t id, std::vector<int> ranks, DeviceCollectives* collectives,
                       Millis start_timeout, Millis timeout, Report report, Broken broken)
    : id_(id),
      ranks_(std::move(ranks)),
      collectives_(collectives),
      start_timeout_(start_timeout),
      timeout_(timeout),
      report_(std::move(report)),
      broken_(std::move(broken)),
      thread_([this] { Loop(); }) {}

DeviceLane::~DeviceLane() {
  Stop();
  thread_.join();
}

void DeviceLane::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
}

void DeviceLane::Put(DeviceTask task) {
  {
    MutexLock lock(mutex_);
    const uint64_t turn = task.turn;
    waiting_.emplace(turn, std::move(task));
    busy_.store(true, std::memory_order_release);
  }
  changed_.NotifyAll();
}

bool DeviceLane::IsMyTurn() const {
  return !waiting_.empty() && waiting_.begin()->first == next_turn_;
}

void DeviceLane::Loop() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    if (last_ != nullptr) {
      const auto look = std::chrono::steady_clock::now() + kLook;
      while (!stopping_ && !IsMyTurn() && std::chrono::steady_clock::now() < look) {
        changed_.WaitUntil(lock, look);
      }
    } else {
      busy_.store(!waiting_.empty(), std::memory_order_release);
      while (!stopping_ && !IsMyTurn()) changed_.Wait(lock);
    }
    if (stopping_) break;
    if (!IsMyTurn()) {
      lock.Unlock();
      const Result<bool> done = last_->Done();
      if (!done.ok()) broken_(done.status());
      if (!done.ok() || done.value()) last_.reset();
      lock.Lock();
      continue;
    }
    DeviceOutcome outcome;
    outcome.task = std::move(waiting_.begin()->second);
    waiting_.erase(waiting_.begin());
    next_turn_ += outcome.task.parts.size();
    lock.Unlock();
    Result<DeviceEvent> event = Run(outcome.task);
    outcome.status = event.status();
    if (event.ok()) outcome.done = std::move(event).value();
    report_(std::move(outcome));
    lock.Lock();
  }
  lock.Unlock();
  last_.reset();
  if (group_ == nullptr) return;
  if (buffer_ != nullptr) {
    const CudaDeviceGuard guard(*cuda_, group_->device());
    (void)cuda_->FreeAsync(buffer_, stream_);
  }
  group_.reset();
}

Status DeviceLane::Prepare() {
  if (group_ != nullptr) return Status::Ok();
  const Result<const CudaApi*> cuda = ProcessCuda();
  if (!cuda.ok()) return cuda.status();
  cuda_ = cuda.value();
  Result<std::unique_ptr<DeviceGroup>> group = collectives_->MakeGroup(id_, ranks_, start_timeout_);
  if (!group.ok()) return group.status();
  group_ = std::move(group).value();
  stream_ = static_cast<CudaStream>(group_->stream());
  packer_.emplace(*cuda_);
  return Status::Ok();
}

Result<DeviceEvent> DeviceLane::Run(const DeviceTask& task) {
  DAD_RETURN_IF_ERROR(Prepare());
  const CudaDeviceGuard guard(*cuda_, group_->device());
  // Parts that can share a buffer, in the order of the first of each group.
  using Key = std::tuple<ReduceOp, DType, double>;
  std::vector<std::pair<Key, std::vector<const DeviceTask::Part*>>> sums;
  std::vector<const DeviceTask::Part*> exchanges;
  for (const DeviceTask::Part& part : task.parts) {
    if (part.turn.failed) continue;
    const OpKind kind = part.spec().kind;
    if (kind == OpKind::kBroadcast) {
      DAD_RETURN_IF_ERROR(Broadcast(part));
      continue;
    }
    if (kind == OpKind::kReduceScatter) {
      DAD_RETURN_IF_ERROR(ReduceScatter(part, task.some_absent));
      continue;
    }
    if (kind == OpKind::kAllGather && AllBringTheSame(part, task.some_absent)) {
      DAD_RETURN_IF_ERROR(AllGather(part));
      continue;
    }
    if (kind == OpKind::kAllGather || kind == OpKind::kAllToAll) {
      exchanges.push_back(&part);
      continue;
    }
    const Key key{part.spec().op, part.spec().dtype, Scale(part.spec())};
    auto found = std::find_if(sums.begin(), sums.end(),
                              [&](const auto& entry) { return entry.first == key; });
    if (found == sums.end()) found = sums.insert(sums.end(), {key, {}});
    found->second.push_back(&part);
  }
  for (const auto& [key, parts] : sums) {
    DAD_RETURN_IF_ERROR(AllReduce(parts, task.some_absent));
  }
  DAD_RETURN_IF_ERROR(Exchange(exchanges));
  return RecordNewEvent(*cuda_, stream_);
}

Status DeviceLane::AllReduce(std::span<const DeviceTask::Part* const> parts, bool some_absent) {
  const TensorSpec& spec = parts.front()->spec();
  if (some_absent) DAD_RETURN_IF_ERROR(CheckZerosCount(spec));
  const bool joined = parts.front()->request == nullptr;
  if (parts.size() == 1 && !joined) {
    const Contribution& mine = Mine(*parts.front());
    if (mine.input.num_elements() == 0) return Status::Ok();
    return Note(group_->AllReduce(mine.input, mine.output, spec.op, Scale(spec), timeout_));
  }
  size_t num_bytes = 0;
  for (const DeviceTask::Part* part : parts) num_bytes += Padded(NumBytes(part->spec()));
  if (num_bytes == 0) return Status::Ok();
  // A lone tensor is sent without padding, on the ranks that have it.
  Result<TensorView> fused = Scratch(
      spec.dtype, {parts.size() == 1 ? NumElements(spec.shape)
                                     : static_cast<int64_t>(num_bytes / SizeOf(spec.dtype))});
  if (!fused.ok()) return fused.status();
  const TensorView& all = fused.value();

  // The padding takes part, too: it must hold valid numbers, and a joined rank has only zeros.
  if (joined) {
    DAD_RETURN_IF_ERROR(
        cuda_->Check(cuda_->MemsetAsync(all.data, 0, all.num_bytes(), stream_), "cudaMemsetAsync"));
    return Note(group_->AllReduce(all, all, spec.op, Scale(spec), timeout_));
  }
  std::vector<DevicePacker::Piece> in, out;
  std::byte* place = all.bytes();
  for (const DeviceTask::Part* part : parts) {
    const Contribution& mine = Mine(*part);
    DAD_RETURN_IF_ERROR(WaitFor(mine.input));
    DAD_RETURN_IF_ERROR(WaitFor(mine.output));
    const size_t bytes = mine.input.num_bytes();
    in.push_back({mine.input.data, place, bytes, Padded(bytes) - bytes});
    out.push_back({place, mine.output.data, bytes, 0});
    place += Padded(bytes);
  }
  DAD_RETURN_IF_ERROR(packer_->Copy(in, stream_));
  DAD_RETURN_IF_ERROR(Note(group_->AllReduce(all, all, spec.op, Scale(spec), timeout_)));
  return packer_->Copy(out, stream_);
}

Status DeviceLane::Broadcast(const DeviceTask::Part& part) {
  if (NumBytes(part.spec()) == 0) return Status::Ok();
  if (part.request == nullptr) {  // takes part with memory that nobody reads
    const Result<TensorView> view = Scratch(part.spec().dtype, part.spec().shape);
    if (!view.ok()) return view.status();
    return Note(group_->Broadcast(view.value(), part.spec().root, timeout_));
  }
  const Contribution& mine = Mine(part);
  if (group_->rank() == part.spec().root && mine.output.data != mine.input.data) {
    DAD_RETURN_IF_ERROR(WaitFor(mine.input));
    DAD_RETURN_IF_ERROR(WaitFor(mine.output));
    DAD_RETURN_IF_ERROR(Copy(mine.output.data, mine.input.data, mine.input.num_bytes()));
  }
  return Note(group_->Broadcast(mine.output, part.spec().root, timeout_));
}

Status DeviceLane::ReduceScatter(const DeviceTask::Part& part, bool some_absent) {
  const TensorSpec& spec = part.spec();
  if (some_absent) DAD_RETURN_IF_ERROR(CheckZerosCount(spec));
  if (NumBytes(spec) == 0) return Status::Ok();
  const int64_t row_elements = RowBytes(spec) / static_cast<int64_t>(SizeOf(spec.dtype));
  std::vector<int64_t> counts;
  for (int member = 0; member < group_->size(); ++member) {
    counts.push_back(RowsOfRank(spec.shape[0], group_->size(), member) * row_elements);
  }
  if (part.request != nullptr) {
    return Note(group_->ReduceScatter(Mine(part).input, counts, part.turn.output, spec.op,
                                      Scale(spec), timeout_));
  }
  // A rank that has joined contributes zeros. Its rows of the result overwrite them; nobody reads
  // it.
  const Result<TensorView> zeros = Scratch(spec.dtype, spec.shape);
  if (!zeros.ok()) return zeros.status();
  DAD_RETURN_IF_ERROR(
      cuda_->Check(cuda_->MemsetAsync(zeros.value().data, 0, zeros.value().num_bytes(), stream_),
                   "cudaMemsetAsync"));
  TensorView own = zeros.value();
  for (int member = 0; member < group_->rank(); ++member) {
    own.data =
        own.bytes() + static_cast<size_t>(counts[static_cast<size_t>(member)]) * SizeOf(spec.dtype);
  }
  own.shape = {counts[static_cast<size_t>(group_->rank())]};
  return Note(group_->ReduceScatter(zeros.value(), counts, own, spec.op, Scale(spec), timeout_));
}

Status DeviceLane::AllGather(const DeviceTask::Part& part) {
  const TensorView& input = Mine(part).input;
  if (input.num_bytes() == 0) return Status::Ok();
  const std::vector<size_t> counts(static_cast<size_t>(group_->size()), input.num_bytes());
  return Note(group_->AllGatherV(input, counts, part.turn.output, timeout_));
}

Status DeviceLane::Exchange(std::span<const DeviceTask::Part* const> parts) {
  std::vector<DeviceGroup::Transfer> transfers;
  std::vector<TensorView> views;
  for (const DeviceTask::Part* part : parts) {
    if (part->request == nullptr) continue;  // a rank that has joined receives nothing
    const auto row_bytes = static_cast<size_t>(RowBytes(part->spec()));
    const TensorView& input = Mine(*part).input;
    const TensorView& output = part->turn.output;
    if (input.num_bytes() + output.num_bytes() == 0) continue;
    views.insert(views.end(), {input, output});
    for (size_t member = 0; member < part->turn.rows.size(); ++member) {
      const DeviceTurn::Rows& rows = part->turn.rows[member];
      transfers.push_back({static_cast<int>(member),
                           input.bytes() + static_cast<size_t>(rows.send_begin) * row_bytes,
                           static_cast<size_t>(rows.send_count) * row_bytes,
                           output.bytes() + static_cast<size_t>(rows.receive_begin) * row_bytes,
                           static_cast<size_t>(rows.receive_count) * row_bytes});
    }
  }
  if (transfers.empty()) return Status::Ok();
  return Note(group_->Exchange(transfers, views, timeout_));
}

Result<TensorView> DeviceLane::Scratch(DType dtype, const Shape& shape) {
  TensorView view;
  view.dtype = dtype;
  view.shape = shape;
  const Result<std::byte*> buffer = Buffer(view.num_bytes());
  if (!buffer.ok()) return buffer.status();
  view.data = buffer.value();
  view.device = DeviceType::kCuda;
  view.device_index = group_->device();
  return view;
}

// Grows and does not shrink: it reaches the size of the largest batch.
Result<std::byte*> DeviceLane::Buffer(size_t num_bytes) {
  if (num_bytes > buffer_bytes_) {
    if (buffer_ != nullptr) {
      DAD_RETURN_IF_ERROR(cuda_->Check(cuda_->FreeAsync(std::exchange(buffer_, nullptr), stream_),
                                       "cudaFreeAsync"));
      buffer_bytes_ = 0;
    }
    DAD_RETURN_IF_ERROR(
        cuda_->Check(cuda_->MallocAsync(&buffer_, num_bytes, stream_), "cudaMallocAsync"));
    buffer_bytes_ = num_bytes;
  }
  return static_cast<std::byte*>(buffer_);
}

Status DeviceLane::WaitFor(const TensorView& view) {
  if (view.ready_event == nullptr) return Status::Ok();
  return cuda_->Check(cuda_->StreamWaitEvent(stream_, static_cast<CudaEvent>(view.ready_event), 0),
                      "cudaStreamWaitEvent");
}

Status DeviceLane::Copy(void* to, const void* from, size_t num_bytes) {
  if (num_bytes == 0) return Status::Ok();
  return cuda_->Check(cuda_->MemcpyAsync(to, from, num_bytes, kCudaMemcpyDefault, stream_),
                      "cudaMemcpyAsync");
}

Status DeviceLane::Note(DeviceGroup::Work work) {
  if (!work.ok()) {
    // The error would be the same on all members only if it concerned the request itself, and that
    // was decided in GoesOnDevice.
    return work.status().code() == StatusCode::kInvalidArgument
               ? Status::Internal(work.status().message())
               : work.status();
  }
  last_ = std::move(work).value();
  return Status::Ok();
}

}  // namespace dad
