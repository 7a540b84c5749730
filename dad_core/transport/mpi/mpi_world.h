// The MPI of this process: started once, shared by all transports, ended when the process ends.
#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>

#include "dad/status.h"

namespace dad::mpi_transport {

// OK, or the call and MPI's message about it.
Status CheckMpi(int code, const char* call);

class MpiWorld {
 public:
  // Starts MPI unless somebody has. Fails when MPI sees other ranks than the launcher
  // started, does not let a thread of ours call it, or has been abandoned.
  static Result<MpiWorld*> Get();

  int rank() const { return rank_; }
  int size() const { return size_; }

  // A communicator of our own, so that no other messages match ours. All ranks create it together
  // at the first call; it lives as long as MPI does.
  Result<MPI_Comm> Communicator(std::chrono::steady_clock::time_point deadline);

  // Distinguishes a message to a peer from the others that are in flight to it.
  int NextTag() { return static_cast<int>(next_tag_++ % num_tags_); }

  // A transfer was given up that MPI still knows. MPI must not be called from now on, not even to
  // end it: it would touch memory that is freed, or wait for dead ranks.
  void Abandon() { abandoned_ = true; }

  // While there is a user, the end of the process does not end MPI.
  void AddUser() { ++num_users_; }
  void RemoveUser() { --num_users_; }

  // Every rank gets the text of rank 0.
  Result<std::string> Broadcast(const std::string& mine) const;

 private:
  Status Start();
  static void AtExit();

  int rank_ = 0;
  int size_ = 1;
  pid_t owner_ = 0;  // the process that started MPI; 0: it was not us
  bool started_ = false;

  std::mutex mutex_;
  MPI_Comm communicator_ = MPI_COMM_NULL;

  uint32_t num_tags_ = 1;
  std::atomic<uint32_t> next_tag_{0};
  std::atomic<int> num_users_{0};
  std::atomic<bool> abandoned_{false};
};

}  // namespace dad::mpi_transport
