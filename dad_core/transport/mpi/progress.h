// The thread that makes all MPI calls of a transport. It sleeps while nothing is under
// way and polls while something is: MPI moves data only when it is called.
#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "dad/status.h"
#include "transport/mpi/mpi_world.h"

namespace dad::mpi_transport {

// One message: its parts are as many MPI messages of the same tag, in order.
struct Transfer {
  enum class Kind { kSend, kReceive };

  Kind kind;
  int peer;
  int tag;
  std::vector<std::span<std::byte>> parts;  // the parts of a send are only read
  std::shared_ptr<void> keep;               // released when all parts are through, or given up
  std::function<void()> done;               // called when all parts are through; may be empty
  size_t parts_left = 0;
};

class Progress {
 public:
  using Clock = std::chrono::steady_clock;
  // MPI has failed, or does not finish what a lost peer has begun. Everything was given up; nothing
  // is called afterwards. Called by the thread.
  using Broken = std::function<void(int peer, const Status& why)>;

  Progress(MpiWorld* world, MPI_Comm communicator, Broken broken);
  ~Progress() { Stop(); }

  // Never blocks. Ignored once MPI is broken or stopped.
  void Start(Transfer transfer);

  // This peer is gone: what it has sent may still arrive until `deadline`.
  void GiveUpAt(int peer, Clock::time_point deadline);

  // Waits until every send has completed, except those to peers that are gone. Returns a peer that
  // does not take its message in time, if there is one.
  std::optional<int> WaitForSends(Clock::time_point deadline);

  // Ends the thread; `done` is not called any more. Transfers in flight get a moment to finish and
  // are abandoned then, with all of MPI. Must not be called by two threads at once.
  void Stop();

  // After Stop: MPI may still write into memory that a transfer was given.
  bool abandoned() const { return abandoned_; }

  int64_t bytes_sent() const { return bytes_sent_; }
  int64_t bytes_received() const { return bytes_received_; }

 private:
  struct Part {
    std::shared_ptr<Transfer> transfer;
    int num_bytes;
  };

  // How long to wait for something.
  struct Patience {
    Clock::time_point deadline;
    int polls_since = 0;  // since the deadline

    bool IsOver();
  };

  void Run();
  // Waits for work, or a moment if there is or was some; false: stop.
  bool WaitForWork(std::vector<std::shared_ptr<Transfer>>* started);
  void Post(const std::shared_ptr<Transfer>& transfer);
  void Poll();
  void FinishPart(Part part, const MPI_Status& status);
  void Finish(const std::shared_ptr<Transfer>& transfer);
  void CheckDeadlines();
  void Break(int peer, const Status& why);
  void WindDown();
  void Nudge();
  void Abandon(const std::string& why);
  std::optional<int> AwaitedPeerLocked() const;

  MpiWorld* const world_;
  const MPI_Comm communicator_;
  const Broken broken_;

  // Used by the thread only. Requests and parts form pairs.
  std::vector<MPI_Request> requests_;
  std::vector<Part> parts_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  int idle_polls_ = 0;
  Clock::time_point last_finished_;
  bool winding_down_ = false;

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable sent_;
  std::vector<std::shared_ptr<Transfer>> queue_;
  std::map<int, int> open_sends_;     // by peer
  std::map<int, Patience> given_up_;  // by peer
  bool closed_ = false;               // stopped or broken

  std::atomic<bool> abandoned_{false};
  std::atomic<int64_t> bytes_sent_{0};
  std::atomic<int64_t> bytes_received_{0};
  std::thread thread_;
};

}  // namespace dad::mpi_transport
