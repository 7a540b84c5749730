// The fake NCCL: communicators of one process, whose calls meet when their streams come to them.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "fake_gpu_state.h"

using dad::CudaStream;
using dad::fake_gpu::current_device;
using dad::fake_gpu::Fake;
using dad::fake_gpu::group_depth;
using dad::fake_gpu::Meeting;
using dad::fake_gpu::Note;
using dad::fake_gpu::Run;
using dad::nccl::Comm;
using dad::nccl::Config;
using dad::nccl::ResultCode;
using dad::nccl::UniqueId;

namespace {

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

}  // namespace

struct dad::fake_gpu::Meeting {
  int size = 0;
  std::set<int> joined;
  std::map<uint64_t, std::map<int, PiecePtr>> collectives;              // number, rank
  std::map<std::pair<int, int>, std::deque<PiecePtr>> sends, receives;  // from, to
};

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

thread_local std::vector<std::pair<CudaStream, PiecePtr>> group_pieces;

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

ResultCode Collect(const char* call, const void* in, void* out, size_t count, int type, int op,
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
  return Collect("ncclAllReduce", in, out, count, type, op, -1, comm, stream);
}
FAKE ResultCode ncclAllGather(const void* in, void* out, size_t count, int type, Comm comm,
                              CudaStream stream) {
  return Collect("ncclAllGather", in, out, count, type, -1, -1, comm, stream);
}
FAKE ResultCode ncclBroadcast(const void* in, void* out, size_t count, int type, int root,
                              Comm comm, CudaStream stream) {
  return Collect("ncclBroadcast", in, out, count, type, -1, root, comm, stream);
}
FAKE ResultCode ncclReduce(const void* in, void* out, size_t count, int type, int op, int root,
                           Comm comm, CudaStream stream) {
  return Collect("ncclReduce", in, out, count, type, op, root, comm, stream);
}
FAKE ResultCode ncclReduceScatter(const void* in, void* out, size_t count, int type, int op,
                                  Comm comm, CudaStream stream) {
  return Collect("ncclReduceScatter", in, out, count, type, op, -1, comm, stream);
}
FAKE ResultCode ncclSend(const void* in, size_t count, int type, int peer, Comm comm,
                         CudaStream stream) {
  return Collect("ncclSend", in, nullptr, count, type, -1, peer, comm, stream);
}
FAKE ResultCode ncclRecv(void* out, size_t count, int type, int peer, Comm comm,
                         CudaStream stream) {
  return Collect("ncclRecv", nullptr, out, count, type, -1, peer, comm, stream);
}
