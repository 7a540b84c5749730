// A fake of the CUDA runtime, NCCL and cuBLAS, for tests: our own code, no GPU and no network. It
// exports the entry points that dad looks up, under their names, keeps a record of the calls, and
// plays streams, events and collectives on host memory, in one process with a device per rank.
//
// It shows that dad makes the right calls in the right order. It does not show that a GPU or the
// real libraries would answer the same way.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace dad::fake_gpu {

struct Record {
  std::string call;  // "ncclSend"
  int device = -1;   // current for the calling thread
  const void* stream = nullptr;
  const void* event = nullptr;
  size_t count = 0;
  int type = -1;
  int peer = -1;       // or root
  bool group = false;  // between ncclGroupStart and ncclGroupEnd
};

// Forgets everything. No stream, event or communicator may be left.
void Reset();

// Calls with this device current, questions (cudaEventQuery, ncclCommGetAsyncError) left out.
std::vector<Record> Log(int device);
int Count(const std::string& call);  // by all devices

// What was created and not destroyed.
int LiveStreams();
int LiveEvents();
int LiveComms();
int LiveBlocks();   // of device memory
int LiveHandles();  // of cuBLAS

void SetDriver(bool there);
void SetDeviceCount(int count);
void SetMultiprocessors(int device, int count);  // 132, unless told
void SetNcclVersion(int version);
// From now on this device gives out no memory for more than so many bytes at once.
void SetLargestBlock(int device, size_t bytes);

// Nothing put on the stream from now on is done until Release.
void Hold(const void* stream);
void Release(const void* stream);
bool Reached(const void* event);  // as cudaEventQuery, without a record

// For what else the tests put on streams, under the name `call`: kernels.
int Enqueue(const char* call, void* stream, std::function<void()> work);

// Every call on a communicator is "in progress" for so many questions, and only then done.
void SetLag(int questions);
// ncclCommGetAsyncError of communicators on this device gives that error.
void SetAsyncError(int device, int code);

}  // namespace dad::fake_gpu
