#include "transport/mpi/mpi_world.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace dad::mpi_transport {
namespace {

constexpr std::chrono::milliseconds kPause{1};

// Never destroyed: AtExit looks at it after the static objects are gone.
MpiWorld& Instance() {
  static auto* world = new MpiWorld;
  return *world;
}

// The number of ranks that the launcher says it has started; 0 if it says nothing, or no number.
int LaunchedRanks() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (const char* value = std::getenv(name)) {
      int ranks = 0;
      const char* end = value + std::strlen(value);
      return std::from_chars(value, end, ranks).ptr == end ? ranks : 0;
    }
  }
  return 0;
}

}  // namespace

Status CheckMpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return Status::Ok();
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return Status::Aborted(std::string(call) + ": " + text);
}

Result<MpiWorld*> MpiWorld::Get() {
  MpiWorld& world = Instance();
  std::lock_guard<std::mutex> lock(world.mutex_);
  if (world.abandoned_) {
    return Status::Unavailable(
        "MPI was given up in this process after a transfer had failed; start the job again, or "
        "use the gloo transport");
  }
  if (!world.started_) DAD_RETURN_IF_ERROR(world.Start());
  return &world;
}

Status MpiWorld::Start() {
  int running = 0;
  int finished = 0;
  MPI_Initialized(&running);
  MPI_Finalized(&finished);
  if (finished != 0) return Status::Unavailable("MPI has been finalised in this process");

  int level = MPI_THREAD_SINGLE;
  // Our calls never overlap, but calls of other code in this process may overlap ours.
  int needed = MPI_THREAD_SERIALIZED;
  if (running != 0) {
    needed = MPI_THREAD_MULTIPLE;
    DAD_RETURN_IF_ERROR(CheckMpi(MPI_Query_thread(&level), "MPI_Query_thread"));
  } else {
    DAD_RETURN_IF_ERROR(CheckMpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level),
                                 "MPI_Init_thread"));
    owner_ = getpid();
    std::atexit(AtExit);
  }
  if (level < needed) {
    return Status::Unavailable("MPI was initialised without MPI_THREAD_MULTIPLE");
  }
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &size_);
  if (const int launched = LaunchedRanks(); launched > 0 && launched != size_) {
    return Status::FailedPrecondition(
        "the launcher has started " + std::to_string(launched) + " ranks, but MPI sees " +
        std::to_string(size_) + ": is this mpirun that of another MPI than " DAD_MPI_FLAVOUR "?");
  }
  void* largest_tag = nullptr;
  int known = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest_tag, &known);
  num_tags_ = known != 0 ? static_cast<uint32_t>(*static_cast<int*>(largest_tag)) : 32767;
  started_ = true;
  return Status::Ok();
}

Result<MPI_Comm> MpiWorld::Communicator(std::chrono::steady_clock::time_point deadline) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (communicator_ != MPI_COMM_NULL) return communicator_;

  MPI_Comm made = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  DAD_RETURN_IF_ERROR(CheckMpi(MPI_Comm_idup(MPI_COMM_WORLD, &made, &request), "MPI_Comm_idup"));
  for (int done = 0;;) {
    DAD_RETURN_IF_ERROR(CheckMpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Comm_idup"));
    if (done != 0) break;
    if (std::chrono::steady_clock::now() > deadline) {
      Abandon();
      return Status::Timeout("not all ranks came to MPI_Comm_idup in time");
    }
    std::this_thread::sleep_for(kPause);
  }
  // An error is reported; it does not end the process.
  MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
  communicator_ = made;
  return communicator_;
}

Result<std::string> MpiWorld::Broadcast(const std::string& mine) const {
  uint64_t length = mine.size();
  DAD_RETURN_IF_ERROR(
      CheckMpi(MPI_Bcast(&length, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD), "MPI_Bcast"));
  std::string text = mine;
  text.resize(length);
  DAD_RETURN_IF_ERROR(CheckMpi(
      MPI_Bcast(text.data(), static_cast<int>(length), MPI_CHAR, 0, MPI_COMM_WORLD), "MPI_Bcast"));
  return text;
}

void MpiWorld::AtExit() {
  MpiWorld& world = Instance();
  int finished = 0;
  MPI_Finalized(&finished);
  if (finished != 0 || world.owner_ != getpid()) return;  // a forked child has no MPI
  if (world.abandoned_ || world.num_users_ > 0) return;
  if (world.communicator_ != MPI_COMM_NULL) MPI_Comm_free(&world.communicator_);
  MPI_Finalize();
}

}  // namespace dad::mpi_transport
