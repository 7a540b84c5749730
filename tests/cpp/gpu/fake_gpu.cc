#include "fake_gpu.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "device/cublas_api.h"
#include "device/cuda_api.h"
#include "transport/nccl/nccl_api.h"

using dad::CudaError;
using dad::CudaEvent;
using dad::CudaStream;
using dad::kCudaNotReady;
using dad::kCudaSuccess;
using dad::fake_gpu::Record;
using dad::nccl::Comm;
using dad::nccl::Config;
using dad::nccl::ResultCode;
using dad::nccl::UniqueId;

#define FAKE extern "C" __attribute__((visibility("default")))

struct dad::CUstream_st {
  bool held = false;
  std::deque<std::function<bool()>> entries;  // each is asked until it says that it is done
};

struct dad::CUevent_st {
  std::shared_ptr<bool> reached = std::make_shared<bool>(true);  // of the last record
};

namespace {

constexpr CudaError kInvalid = 1;
constexpr ResultCode kInvalidUsage = 5;

// One call of NCCL, or one of several in a group.
struct Piece {
  std::string call;
  Comm comm;
  const void* in;
  void* out;
  size_t count;
  int type;
  int op;
  int peer;
  uint64_t number;  // of a collective, within its communicator
  double scale;
  std::shared_ptr<bool> alive;  // the communicator is
  bool done = false;
};
using PiecePtr = std::shared_ptr<Piece>;

// Those with one unique id.
struct Meeting {
  int size = 0;
  std::set<int> joined;
  std::map<uint64_t, std::map<int, PiecePtr>> collectives;              // number, rank
  std::map<std::pair<int, int>, std::deque<PiecePtr>> sends, receives;  // from, to
};

}  // namespace

struct dad::nccl::ncclComm {
  std::shared_ptr<Meeting> meeting;
  int rank;
  int device;
  uint64_t next_number = 0;
  int lag = 0;
  std::function<void()> when_through;  // what a call that is in progress will do
  std::shared_ptr<bool> alive = std::make_shared<bool>(true);
};

namespace {

struct State {
  std::mutex mutex;
  bool driver = true;
  int devices = 8;
  int version = 23203;
  int lag = 0;
  uint64_t next_id = 1;
  std::map<int, int> async_errors;
  std::map<int, int> multiprocessors;
  std::map<int, size_t> largest_block;
  std::vector<Record> log;
  std::set<CudaStream> streams;
  std::set<CudaStream> draining;  // destroyed with work on them, which is still done
  std::set<CudaEvent> events;
  std::set<Comm> comms;
  std::map<uint64_t, std::shared_ptr<Meeting>> meetings;
  std::set<void*> blocks;                             // of device memory
  std::map<int, std::pair<int, double>> scaled_sums;  // op: type, factor
  int next_op = 5;
  std::set<dad::CublasHandle> handles;
};
State& Fake() {
  static auto* state = new State;
  return *state;
}

thread_local int current_device = 0;
thread_local int group_depth = 0;
thread_local std::vector<std::pair<CudaStream, PiecePtr>> group_pieces;

void Note(const char* call, const void* stream = nullptr, const void* event = nullptr,
          size_t count = 0, int type = -1, int peer = -1) {
  Fake().log.push_back({call, current_device, stream, event, count, type, peer, group_depth > 0});
}

size_t SizeOfType(int type) {
  switch (type) {
    case 0:
    case 1: return 1;
    case 6:
    case 9: return 2;
    case 2:
    case 3:
    case 7: return 4;
    default: return 8;
  }
}

template <typename T>
void ReduceAs(const std::map<int, PiecePtr>& all, size_t begin, size_t count, int op, void* out) {
  std::vector<T> result(count);
  bool first = true;
  for (const auto& [rank, piece] : all) {
    const T* in = static_cast<const T*>(piece->in) + begin;
    for (size_t i = 0; i < count; ++i) {
      T& to = result[i];
      const T value = piece->scale == 1.0 ? in[i] : static_cast<T>(in[i] * piece->scale);
      if (first) {
        to = value;
      } else if (op == 0 || op == 4) {
        to = static_cast<T>(to + value);
      } else if (op == 1) {
        to = static_cast<T>(to * value);
      } else {
        to = (op == 2) == (value > to) ? value : to;
      }
    }
    first = false;
  }
  if (op == 4) {
    for (T& value : result) value = static_cast<T>(value / static_cast<T>(all.size()));
  }
  if (count > 0) std::memcpy(out, result.data(), count * sizeof(T));
}

// Elements [begin, begin + count) of all inputs.
void Reduce(const std::map<int, PiecePtr>& all, size_t begin, size_t count, int type, int op,
            void* out) {
  switch (type) {
    case 0: return ReduceAs<int8_t>(all, begin, count, op, out);
    case 1: return ReduceAs<uint8_t>(all, begin, count, op, out);
    case 2: return ReduceAs<int32_t>(all, begin, count, op, out);
    case 4: return ReduceAs<int64_t>(all, begin, count, op, out);
    case 7: return ReduceAs<float>(all, begin, count, op, out);
    case 8: return ReduceAs<double>(all, begin, count, op, out);
    default: std::fprintf(stderr, "fake gpu: no arithmetic for type %d\n", type), std::abort();
  }
}

void Execute(const std::map<int, PiecePtr>& all) {
  const Piece& one = *all.begin()->second;
  // Of several in place, none may be written before all are read.
  std::vector<std::vector<char>> results;
  for (const auto& [rank, piece] : all) {
    if (piece->call != one.call || piece->count != one.count || piece->type != one.type ||
        piece->op != one.op || piece->peer != one.peer) {
      std::fprintf(stderr, "fake gpu: ranks do not call the same: %s of %zu, %s of %zu\n",
                   one.call.c_str(), one.count, piece->call.c_str(), piece->count);
      std::abort();
    }
    const size_t bytes = one.count * SizeOfType(one.type);
    std::vector<char> result(bytes);
    if (one.call == "ncclAllGather") {
      result.clear();
      for (const auto& [from, gathered] : all) {
        const char* begin = static_cast<const char*>(gathered->in);
        if (bytes > 0) result.insert(result.end(), begin, begin + bytes);
      }
    } else if (one.call == "ncclBroadcast") {
      if (bytes > 0) std::memcpy(result.data(), all.at(one.peer)->in, bytes);
    } else if (one.call == "ncclReduceScatter") {
      Reduce(all, static_cast<size_t>(rank) * one.count, one.count, one.type, one.op,
             result.data());
    } else if (one.call == "ncclAllReduce" || rank == one.peer) {
      Reduce(all, 0, one.count, one.type, one.op, result.data());
    } else {
      result.clear();  // ncclReduce, elsewhere
    }
    results.push_back(std::move(result));
  }
  size_t at = 0;
  for (const auto& [rank, piece] : all) {
    const std::vector<char>& result = results[at++];
    if (!result.empty()) std::memcpy(piece->out, result.data(), result.size());
    piece->done = true;
  }
}

// The kernel has started: its peers can find it.
void Arrive(const PiecePtr& piece) {
  if (!*piece->alive) {  // aborted before its turn on the stream
    piece->done = true;
    return;
  }
  Meeting& meeting = *piece->comm->meeting;
  const int rank = piece->comm->rank;
  const bool sends = piece->call == "ncclSend";
  if (sends || piece->call == "ncclRecv") {
    const auto way = sends ? std::pair(rank, piece->peer) : std::pair(piece->peer, rank);
    (sends ? meeting.sends : meeting.receives)[way].push_back(piece);
    auto& from = meeting.sends[way];
    auto& to = meeting.receives[way];
    while (!from.empty() && !to.empty()) {
      if (from.front()->count != to.front()->count) {
        std::fprintf(stderr, "fake gpu: %zu bytes sent, %zu expected\n", from.front()->count,
                     to.front()->count);
        std::abort();
      }
      if (to.front()->count > 0) std::memcpy(to.front()->out, from.front()->in, to.front()->count);
      from.front()->done = to.front()->done = true;
      from.pop_front();
      to.pop_front();
    }
    return;
  }
  auto& all = meeting.collectives[piece->number];
  all[rank] = piece;
  if (static_cast<int>(all.size()) == meeting.size) Execute(all);
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

void Put(CudaStream stream, std::vector<PiecePtr> pieces) {
  stream->entries.push_back([pieces = std::move(pieces), arrived = false]() mutable {
    if (!arrived) {
      for (const PiecePtr& piece : pieces) {
        if (!piece->done) Arrive(piece);
      }
    }
    arrived = true;
    for (const PiecePtr& piece : pieces) {
      if (!piece->done) return false;
    }
    return true;
  });
}

// Does it now, or when the communicator has been asked often enough.
ResultCode Through(Comm comm, std::function<void()> what) {
  if (comm->lag > 0 || comm->when_through) {
    std::fprintf(stderr, "fake gpu: a call while the one before is in progress\n");
    std::abort();
  }
  comm->lag = Fake().lag;
  if (comm->lag == 0) {
    what();
    return dad::nccl::kSuccess;
  }
  comm->when_through = std::move(what);
  return dad::nccl::kInProgress;
}

ResultCode Launch(std::vector<std::pair<CudaStream, PiecePtr>> launched) {
  if (launched.empty()) return dad::nccl::kSuccess;
  const CudaStream stream = launched.front().first;
  const Comm comm = launched.front().second->comm;
  std::vector<PiecePtr> pieces;
  for (auto& [each, piece] : launched) {
    if (each != stream || piece->comm != comm) std::abort();  // dad does not mix them
    pieces.push_back(std::move(piece));
  }
  return Through(comm, [stream, pieces] {
    Put(stream, pieces);
    Run();
  });
}

ResultCode Enqueue(const char* call, const void* in, void* out, size_t count, int type, int op,
                   int peer, Comm comm, CudaStream stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note(call, stream, nullptr, count, type, peer);
  if (Fake().comms.count(comm) == 0 || Fake().streams.count(stream) == 0) return kInvalidUsage;
  const std::string name = call;
  const bool pair = name == "ncclSend" || name == "ncclRecv";
  double scale = 1.0;
  if (op >= 5) {
    const auto scaled = Fake().scaled_sums.find(op);
    if (scaled == Fake().scaled_sums.end() || scaled->second.first != type) return kInvalidUsage;
    scale = scaled->second.second;
    op = 0;
  }
  auto piece = std::make_shared<Piece>(Piece{name, comm, in, out, count, type, op, peer,
                                             pair ? 0 : comm->next_number++, scale, comm->alive});
  if (group_depth > 0) {
    group_pieces.emplace_back(stream, std::move(piece));
    return dad::nccl::kSuccess;
  }
  return Launch({{stream, std::move(piece)}});
}

// Kernels of a communicator that is gone end by themselves.
void EndPieces(Comm comm) {
  Meeting& meeting = *comm->meeting;
  for (auto& [number, all] : meeting.collectives) {
    if (const auto found = all.find(comm->rank); found != all.end()) found->second->done = true;
  }
  for (auto* queues : {&meeting.sends, &meeting.receives}) {
    for (auto& [way, queue] : *queues) {
      for (const PiecePtr& piece : queue) piece->done = piece->done || piece->comm == comm;
      std::erase_if(queue, [&](const PiecePtr& piece) { return piece->comm == comm; });
    }
  }
}

}  // namespace

namespace dad::fake_gpu {

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

// ---- The CUDA runtime.

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

// ---- cuBLAS.

struct dad::cublasContext {
  CudaStream stream = nullptr;
};

FAKE int cublasCreate_v2(dad::CublasHandle* handle) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cublasCreate");
  Fake().handles.insert(*handle = new dad::cublasContext);
  return 0;
}
FAKE int cublasGetProperty(int which, int* value) {
  *value = which == 0 ? 13 : 0;
  return 0;
}
FAKE int cublasDestroy_v2(dad::CublasHandle handle) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cublasDestroy");
  if (Fake().handles.erase(handle) == 0) return 1;
  delete handle;
  return 0;
}
FAKE int cublasSetStream_v2(dad::CublasHandle handle, CudaStream stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cublasSetStream", stream);
  handle->stream = stream;
  return 0;
}

namespace {

// Column-major, as cuBLAS has it.
template <typename T>
int Gemm(const char* call, dad::CublasHandle handle, int trans_a, int trans_b, int m, int n, int k,
         T alpha, const T* a, int lda, const T* b, int ldb, T beta, T* c, int ldc) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note(call, handle->stream, nullptr, static_cast<size_t>(m) * static_cast<size_t>(n), trans_a,
       trans_b);
  if (lda < std::max(1, trans_a ? k : m) || ldb < std::max(1, trans_b ? n : k) || ldc < m) return 7;
  handle->stream->entries.push_back([=] {
    for (int j = 0; j < n; ++j) {
      for (int i = 0; i < m; ++i) {
        double sum = 0;
        for (int l = 0; l < k; ++l) {
          sum += double{trans_a ? a[l + i * lda] : a[i + l * lda]} *
                 double{trans_b ? b[j + l * ldb] : b[l + j * ldb]};
        }
        T& to = c[i + j * ldc];
        to = static_cast<T>(alpha * sum + (beta == T(0) ? 0.0 : beta * to));
      }
    }
    return true;
  });
  Run();
  return 0;
}

}  // namespace

FAKE int cublasSgemm_v2(dad::CublasHandle handle, int ta, int tb, int m, int n, int k,
                        const float* alpha, const float* a, int lda, const float* b, int ldb,
                        const float* beta, float* c, int ldc) {
  return Gemm("cublasSgemm", handle, ta, tb, m, n, k, *alpha, a, lda, b, ldb, *beta, c, ldc);
}
FAKE int cublasDgemm_v2(dad::CublasHandle handle, int ta, int tb, int m, int n, int k,
                        const double* alpha, const double* a, int lda, const double* b, int ldb,
                        const double* beta, double* c, int ldc) {
  return Gemm("cublasDgemm", handle, ta, tb, m, n, k, *alpha, a, lda, b, ldb, *beta, c, ldc);
}

// ---- NCCL.

FAKE ResultCode ncclGetVersion(int* version) {
  *version = Fake().version;
  return dad::nccl::kSuccess;
}
FAKE const char* ncclGetErrorString(ResultCode code) {
  return code == 6 ? "remote process exited or there was a network error" : "fake error";
}
FAKE ResultCode ncclGetUniqueId(UniqueId* id) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("ncclGetUniqueId");
  *id = {};
  const uint64_t number = Fake().next_id++;
  std::memcpy(id->internal, &number, sizeof number);
  return dad::nccl::kSuccess;
}
FAKE ResultCode ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank,
                                       Config* config) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("ncclCommInitRankConfig", nullptr, nullptr, static_cast<size_t>(size), config->blocking,
       rank);
  if (config->magic != 0xcafebeef || config->size != 24 || config->version != 21400) {
    return kInvalidUsage;
  }
  uint64_t number = 0;
  std::memcpy(&number, id.internal, sizeof number);
  auto& meeting = Fake().meetings[number];
  if (meeting == nullptr) meeting = std::make_shared<Meeting>();
  meeting->size = size;
  *comm = new dad::nccl::ncclComm{
      meeting, rank, current_device, 0, 0, nullptr, std::make_shared<bool>(true)};
  Fake().comms.insert(*comm);
  return Through(*comm, [meeting, rank] { meeting->joined.insert(rank); }) == dad::nccl::kSuccess &&
                 static_cast<int>(meeting->joined.size()) == size
             ? dad::nccl::kSuccess
             : dad::nccl::kInProgress;
}
FAKE ResultCode ncclCommGetAsyncError(Comm comm, ResultCode* state) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  if (Fake().comms.count(comm) == 0) return kInvalidUsage;
  if (const auto error = Fake().async_errors.find(comm->device);
      error != Fake().async_errors.end()) {
    *state = error->second;
    return dad::nccl::kSuccess;
  }
  if (comm->lag > 0) --comm->lag;
  if (comm->lag == 0 && comm->when_through) std::exchange(comm->when_through, nullptr)();
  const bool all = static_cast<int>(comm->meeting->joined.size()) == comm->meeting->size;
  *state = comm->lag > 0 || !all ? dad::nccl::kInProgress : dad::nccl::kSuccess;
  return dad::nccl::kSuccess;
}
FAKE ResultCode ncclCommFinalize(Comm comm) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("ncclCommFinalize");
  if (Fake().comms.count(comm) == 0) return kInvalidUsage;
  return Through(comm, [] {});
}
FAKE ResultCode ncclCommDestroy(Comm comm) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("ncclCommDestroy");
  if (Fake().comms.erase(comm) == 0) return kInvalidUsage;
  *comm->alive = false;
  delete comm;
  return dad::nccl::kSuccess;
}
FAKE ResultCode ncclCommAbort(Comm comm) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("ncclCommAbort");
  if (Fake().comms.erase(comm) == 0) return kInvalidUsage;
  *comm->alive = false;
  EndPieces(comm);
  Run();
  delete comm;
  return dad::nccl::kSuccess;
}
FAKE ResultCode ncclGroupStart() {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("ncclGroupStart");
  ++group_depth;
  return dad::nccl::kSuccess;
}
FAKE ResultCode ncclGroupEnd() {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  if (--group_depth > 0) return dad::nccl::kSuccess;
  Note("ncclGroupEnd");
  return Launch(std::exchange(group_pieces, {}));
}
FAKE ResultCode ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence,
                                         Comm comm) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("ncclRedOpCreatePreMulSum", nullptr, nullptr, 0, type);
  if (Fake().comms.count(comm) == 0 || residence != 1) return kInvalidUsage;
  double factor = 0;
  if (type == 8) {
    std::memcpy(&factor, scalar, sizeof factor);
  } else if (type == 7) {
    float single = 0;
    std::memcpy(&single, scalar, sizeof single);
    factor = single;
  } else {
    return kInvalidUsage;  // the fake has no arithmetic for the others
  }
  *op = Fake().next_op++;
  Fake().scaled_sums[*op] = {type, factor};
  return dad::nccl::kSuccess;
}
FAKE ResultCode ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm comm,
                              CudaStream stream) {
  return Enqueue("ncclAllReduce", in, out, count, type, op, -1, comm, stream);
}
FAKE ResultCode ncclAllGather(const void* in, void* out, size_t count, int type, Comm comm,
                              CudaStream stream) {
  return Enqueue("ncclAllGather", in, out, count, type, -1, -1, comm, stream);
}
FAKE ResultCode ncclBroadcast(const void* in, void* out, size_t count, int type, int root,
                              Comm comm, CudaStream stream) {
  return Enqueue("ncclBroadcast", in, out, count, type, -1, root, comm, stream);
}
FAKE ResultCode ncclReduce(const void* in, void* out, size_t count, int type, int op, int root,
                           Comm comm, CudaStream stream) {
  return Enqueue("ncclReduce", in, out, count, type, op, root, comm, stream);
}
FAKE ResultCode ncclReduceScatter(const void* in, void* out, size_t count, int type, int op,
                                  Comm comm, CudaStream stream) {
  return Enqueue("ncclReduceScatter", in, out, count, type, op, -1, comm, stream);
}
FAKE ResultCode ncclSend(const void* in, size_t count, int type, int peer, Comm comm,
                         CudaStream stream) {
  return Enqueue("ncclSend", in, nullptr, count, type, -1, peer, comm, stream);
}
FAKE ResultCode ncclRecv(void* out, size_t count, int type, int peer, Comm comm,
                         CudaStream stream) {
  return Enqueue("ncclRecv", nullptr, out, count, type, -1, peer, comm, stream);
}
