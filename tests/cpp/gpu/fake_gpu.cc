// The fake CUDA runtime, and what tests ask of the whole fake.
#include "fake_gpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fake_gpu_state.h"

using dad::CudaError;
using dad::CudaEvent;
using dad::CudaStream;
using dad::kCudaNotReady;
using dad::kCudaSuccess;
using dad::fake_gpu::current_device;
using dad::fake_gpu::Fake;
using dad::fake_gpu::kInvalid;
using dad::fake_gpu::Note;
using dad::fake_gpu::Run;

namespace dad::fake_gpu {

State& Fake() {
  static auto* state = new State;
  return *state;
}

void Note(const char* call, const void* stream, const void* event, size_t count, int type,
          int peer) {
  Fake().log.push_back({call, current_device, stream, event, count, type, peer, group_depth > 0});
}

void Run() {
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto* streams : {&Fake().streams, &Fake().draining}) {
      for (const CudaStream stream : *streams) {
        while (!stream->held && !stream->entries.empty() && stream->entries.front()()) {
          stream->entries.pop_front();
          moved = true;
        }
      }
    }
  }
  std::erase_if(Fake().draining, [](CudaStream stream) {
    const bool empty = stream->entries.empty();
    if (empty) delete stream;
    return empty;
  });
}

__attribute__((visibility("default"))) void Reset() {
  State& fake = Fake();
  const std::lock_guard<std::mutex> lock(fake.mutex);
  fake.driver = true;
  fake.devices = 8;
  fake.version = 23203;
  fake.lag = 0;
  fake.async_errors.clear();
  fake.multiprocessors.clear();
  fake.largest_block.clear();
  fake.log.clear();
  fake.meetings.clear();
  fake.scaled_sums.clear();
}
__attribute__((visibility("default"))) std::vector<Record> Log(int device) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  std::vector<Record> log = Fake().log;
  std::erase_if(log, [&](const Record& record) { return record.device != device; });
  return log;
}
__attribute__((visibility("default"))) int Count(const std::string& call) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  int count = 0;
  for (const Record& record : Fake().log) count += record.call == call;
  return count;
}
#define SIZE_OF(name, member)                             \
  __attribute__((visibility("default"))) int name() {     \
    const std::lock_guard<std::mutex> lock(Fake().mutex); \
    return static_cast<int>(Fake().member.size());        \
  }
SIZE_OF(LiveStreams, streams)
SIZE_OF(LiveEvents, events)
SIZE_OF(LiveComms, comms)
SIZE_OF(LiveBlocks, blocks)
SIZE_OF(LiveHandles, handles)
#undef SIZE_OF
#define SET(name, type, member)                                  \
  __attribute__((visibility("default"))) void name(type value) { \
    const std::lock_guard<std::mutex> lock(Fake().mutex);        \
    Fake().member = value;                                       \
  }
SET(SetDriver, bool, driver)
SET(SetDeviceCount, int, devices)
SET(SetNcclVersion, int, version)
SET(SetLag, int, lag)
#undef SET
__attribute__((visibility("default"))) void SetAsyncError(int device, int code) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Fake().async_errors[device] = code;
}
__attribute__((visibility("default"))) void SetMultiprocessors(int device, int count) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Fake().multiprocessors[device] = count;
}
__attribute__((visibility("default"))) void SetLargestBlock(int device, size_t bytes) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Fake().largest_block[device] = bytes;
}
__attribute__((visibility("default"))) int Enqueue(const char* call, void* stream,
                                                   std::function<void()> work) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note(call, stream);
  if (Fake().streams.count(static_cast<CudaStream>(stream)) == 0) return kInvalid;
  static_cast<CudaStream>(stream)->entries.push_back([work = std::move(work)] {
    work();
    return true;
  });
  Run();
  return kCudaSuccess;
}
__attribute__((visibility("default"))) void Hold(const void* stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  static_cast<CudaStream>(const_cast<void*>(stream))->held = true;
}
__attribute__((visibility("default"))) void Release(const void* stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  static_cast<CudaStream>(const_cast<void*>(stream))->held = false;
  Run();
}
__attribute__((visibility("default"))) bool Reached(const void* event) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  return *static_cast<CudaEvent>(const_cast<void*>(event))->reached;
}

}  // namespace dad::fake_gpu

FAKE const char* cudaGetErrorString(CudaError error) {
  if (error == dad::kCudaNoMemory) return "out of memory";
  return error == kCudaNotReady ? "not ready" : error == kCudaSuccess ? "no error" : "fake error";
}
FAKE CudaError cudaGetLastError() { return kCudaSuccess; }
FAKE CudaError cudaDriverGetVersion(int* version) {
  *version = Fake().driver ? 13000 : 0;
  return kCudaSuccess;
}
FAKE CudaError cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return kCudaSuccess;
}
FAKE CudaError cudaGetDeviceCount(int* count) {
  *count = Fake().devices;
  return kCudaSuccess;
}
FAKE CudaError cudaGetDevice(int* device) {
  *device = current_device;
  return kCudaSuccess;
}
FAKE CudaError cudaSetDevice(int device) {
  current_device = device;
  return kCudaSuccess;
}
FAKE CudaError cudaDeviceGetAttribute(int* value, int attribute, int device) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  if (attribute == dad::kCudaMultiprocessors) {
    const auto set = Fake().multiprocessors.find(device);
    *value = set == Fake().multiprocessors.end() ? 132 : set->second;
  } else {
    *value = attribute == dad::kCudaComputeMajor ? 9 : 0;
  }
  return kCudaSuccess;
}
FAKE CudaError cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kCudaSuccess;
}
FAKE CudaError cudaStreamCreateWithPriority(CudaStream* stream, unsigned flags, int priority) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  *stream = new dad::CUstream_st;
  Fake().streams.insert(*stream);
  // flags and priority, where other calls have a type and a peer
  Note("cudaStreamCreateWithPriority", *stream, nullptr, 0, static_cast<int>(flags), priority);
  return kCudaSuccess;
}
FAKE CudaError cudaStreamDestroy(CudaStream stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cudaStreamDestroy", stream);
  if (Fake().streams.erase(stream) == 0) return kInvalid;
  Fake().draining.insert(stream);
  Run();
  return kCudaSuccess;
}
FAKE CudaError cudaEventCreateWithFlags(CudaEvent* event, unsigned flags) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  *event = new dad::CUevent_st;
  Fake().events.insert(*event);
  Note("cudaEventCreateWithFlags", nullptr, *event, 0, static_cast<int>(flags));
  return kCudaSuccess;
}
FAKE CudaError cudaEventDestroy(CudaEvent event) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cudaEventDestroy", nullptr, event);
  if (Fake().events.erase(event) == 0) return kInvalid;
  delete event;
  return kCudaSuccess;
}
FAKE CudaError cudaEventRecord(CudaEvent event, CudaStream stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cudaEventRecord", stream, event);
  if (Fake().events.count(event) == 0 || Fake().streams.count(stream) == 0) return kInvalid;
  event->reached = std::make_shared<bool>(false);
  stream->entries.push_back([reached = event->reached] { return *reached = true; });
  Run();
  return kCudaSuccess;
}
FAKE CudaError cudaEventQuery(CudaEvent event) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  if (Fake().events.count(event) == 0) return kInvalid;
  return *event->reached ? kCudaSuccess : kCudaNotReady;
}
FAKE CudaError cudaStreamWaitEvent(CudaStream stream, CudaEvent event, unsigned) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cudaStreamWaitEvent", stream, event);
  if (Fake().events.count(event) == 0 || Fake().streams.count(stream) == 0) return kInvalid;
  stream->entries.push_back([reached = event->reached] { return *reached; });
  Run();
  return kCudaSuccess;
}
FAKE CudaError cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, CudaStream stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cudaMemcpyAsync", stream, nullptr, bytes);
  stream->entries.push_back([=] {
    std::memcpy(to, from, bytes);
    return true;
  });
  Run();
  return kCudaSuccess;
}

FAKE CudaError cudaMemsetAsync(void* to, int value, size_t bytes, CudaStream stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cudaMemsetAsync", stream, nullptr, bytes);
  stream->entries.push_back([=] {
    std::memset(to, value, bytes);
    return true;
  });
  Run();
  return kCudaSuccess;
}
FAKE CudaError cudaMallocAsync(void** block, size_t bytes, CudaStream stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cudaMallocAsync", stream, nullptr, bytes);
  const auto largest = Fake().largest_block.find(current_device);
  if (largest != Fake().largest_block.end() && bytes > largest->second) return dad::kCudaNoMemory;
  Fake().blocks.insert(*block = std::malloc(bytes));
  return kCudaSuccess;
}
FAKE CudaError cudaFreeAsync(void* block, CudaStream stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cudaFreeAsync", stream);
  if (Fake().blocks.erase(block) == 0) return kInvalid;
  stream->entries.push_back([block] {
    std::free(block);
    return true;
  });
  Run();
  return kCudaSuccess;
}
FAKE CudaError cudaHostAlloc(void** block, size_t bytes, unsigned) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cudaHostAlloc", nullptr, nullptr, bytes);
  *block = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return kCudaSuccess;
}
FAKE CudaError cudaFreeHost(void* block) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cudaFreeHost");
  std::free(block);
  return kCudaSuccess;
}
