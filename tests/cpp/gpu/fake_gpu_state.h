// What the fake CUDA runtime, cuBLAS and NCCL share: streams, and a record of all calls. Only for
// the fake's own files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "device/cublas_api.h"
#include "device/cuda_api.h"
#include "fake_gpu.h"
#include "transport/nccl/nccl_api.h"

#define FAKE extern "C" __attribute__((visibility("default")))

struct dad::CUstream_st {
  bool held = false;
  std::deque<std::function<bool()>> entries;  // each is asked until it says that it is done
};

struct dad::CUevent_st {
  std::shared_ptr<bool> reached = std::make_shared<bool>(true);  // of the last record
};

namespace dad::fake_gpu {

constexpr CudaError kInvalid = 1;

struct Meeting;  // of the communicators with one unique id

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
  std::set<nccl::Comm> comms;
  std::map<uint64_t, std::shared_ptr<Meeting>> meetings;
  std::set<void*> blocks;                             // of device memory
  std::map<int, std::pair<int, double>> scaled_sums;  // op: type, factor
  int next_op = 5;
  std::set<CublasHandle> handles;
};
State& Fake();

inline thread_local int current_device = 0;
inline thread_local int group_depth = 0;  // of NCCL

// Needs the mutex, as does Run: does what streams can do by now.
void Note(const char* call, const void* stream = nullptr, const void* event = nullptr,
          size_t count = 0, int type = -1, int peer = -1);
void Run();

}  // namespace dad::fake_gpu
