// The engine of one process: takes requests, negotiates them with the other
// ranks, runs them on a worker thread. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dad/export.h"
#include "dad/options.h"
#include "dad/request.h"
#include "dad/snapshot.h"
#include "dad/state.h"
#include "dad/status.h"
#include "dad/ticket.h"

namespace dad {

class Transport;

// This process's place in the world, as the launcher gave it.
struct World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int cross_rank = 0;
  int cross_size = 1;
  std::string hostname;
  // "http://ADDR:PORT", "file:///DIR" or empty for one process.
  std::string rendezvous;
  // Tells one init() of a job from the next; equal on all ranks.
  std::string generation = "0";
  // The name of the job, and the secret by which its ranks know each other; empty: open to all.
  std::string job;
  std::string secret;
  // Signs what this rank says to the rendezvous server; empty: the server knows no secret.
  std::string store_key;
  std::string transport = "gloo";
  std::string plugin_dir;  // where libdad_<transport>.so lie
};

// Fills in the job, its secret and the key of its store from what dadrun has left for this process,
// or from DAD_SECRET_FILE; a job without a secret stays open. For programs without Python, which
// has runner/secret.py. An error if there should be a secret and it cannot be read.
DAD_EXPORT Status TakeSecret(World* world, const Options::Getenv& getenv);

struct RecentTraffic {
  int64_t steps = 0;
  int64_t sent = 0;
  double seconds = 0.0;
  int64_t hosts_sent = 0;  // of these; see TensorStats::hosts_bytes_sent
};

// The step in which a tensor took longest on this rank, from the submit to the result.
struct WorstStep {
  int64_t step = 0;  // counts from 1; 0: there was none
  double seconds = 0.0;
  double waited = 0.0;  // of these, until the last rank had the tensor ready
  int last_rank = -1;   // that rank; -1: not known
};

struct TensorStats {
  std::string name;
  HostStep host_step = HostStep::kNone;  // users see the sum of all steps
  int64_t steps = 0;
  int64_t wire_bytes_sent = 0;
  int64_t wire_bytes_received = 0;
  // Bytes of this rank's input that were handed to NCCL, which does not report what it sends. They
  // are not counted at the socket.
  int64_t device_bytes = 0;
  // What a dense allreduce would have sent for the tensors that went through sockets.
  int64_t dense_bytes = 0;
  // The rank of what the last step applied, or the share of elements that it sent; negative for
  // methods that have neither.
  double effective = -1.0;
  // The part of the energy of residual and gradient together that steps have sent of late, for
  // methods with a dense residual; negative: not known.
  double captured = -1.0;
  double seconds = 0.0;  // from the first byte sent to the result, over all steps
  RecentTraffic recent;  // of these, since it last changed its collective or method
  // The part of wire_bytes_sent that went to other hosts, if sums go from host to host; else 0.
  int64_t hosts_bytes_sent = 0;
  WorstStep worst;
};

// The rank that was last to have its tensors ready, as this rank saw it: up to when its message had
// come. Of the last hundred steps.
struct SlowestRank {
  int rank = -1;               // -1: there were no such steps
  int64_t steps = 0;           // that are looked at
  int64_t last_in = 0;         // of these, in which it was the last
  double seconds = 0.0;        // in all of these, after the first rank
  double worst_seconds = 0.0;  // in one of them
};

struct Stats {
  int64_t steps = 0;            // of the tensor that was exchanged most often
  int64_t wire_bytes_sent = 0;  // at the socket, payload and control
  int64_t wire_bytes_received = 0;
  int64_t payload_bytes_sent = 0;
  int64_t control_bytes_sent = 0;
  int64_t messages_sent = 0;
  int64_t device_bytes = 0;  // see TensorStats
  int64_t dense_bytes = 0;
  int64_t negotiations = 0;       // rounds of readiness messages
  int64_t predicted_batches = 0;  // went without one
  // To other hosts, as far as the line set the pace of what was sent so far; 0: not known.
  double line_bytes_per_second = 0.0;
  SlowestRank slowest;
  std::vector<TensorStats> tensors;
};

// A request that other ranks have submitted, and this one has not.
struct Wanted {
  std::string name;
  std::vector<int> ranks;  // that have it
};

class DAD_EXPORT Engine {
 public:
  // Meets the other ranks and starts the worker. The static process sets are
  // made in the order given; they get the ids 1, 2, …
  static Result<std::unique_ptr<Engine>> Create(const World& world, const Options& options,
                                                std::vector<std::vector<int>> process_sets = {});
  // For tests: runs over an existing transport.
  static Result<std::unique_ptr<Engine>> CreateOn(std::unique_ptr<Transport> transport,
                                                  const World& world, const Options& options,
                                                  std::vector<std::vector<int>> process_sets = {});
  // Sends a goodbye to the peers and fails every ticket that is still open.
  virtual ~Engine() = default;

  // Never blocks. Misuse and failures come back in the ticket.
  virtual std::shared_ptr<Ticket> Submit(Request request) = 0;
  // Submits a request that has a label ("allreduce") instead of a name, as "<label>.noname.<n>":
  // ranks that make the same calls in the same order get the same names. n counts the requests of
  // this label in this process set. It starts at 0 with the engine, and again in all process sets
  // when all ranks have come to a join(), since they came to it after different numbers of calls.
  // A request that is rejected on this rank does not consume a number. `name`: what it is called.
  virtual std::shared_ptr<Ticket> SubmitUnnamed(Request request, std::string* name = nullptr) = 0;
  // The number of joins that all ranks have reached. It grows before the ticket of the join is
  // done.
  virtual int64_t num_joins() const = 0;
  // Submits several requests, for which the worker wakes up once. `done` is called for each as by
  // Ticket::OnDone, with its index, possibly before this returns. With `user_waits` a user blocks
  // on all of them (Ticket::UserWaits).
  using Tickets = std::vector<std::shared_ptr<Ticket>>;
  using OneDone = std::function<void(size_t place, const std::shared_ptr<Ticket>&, const Status&)>;
  virtual Tickets SubmitAll(std::vector<Request> requests, bool user_waits, OneDone done);
  // Ends requests of this step (Request::step) that have not begun with `why`; later requests of
  // the step end at once. Does not block.
  virtual void GiveUp(uint64_t step, const Status& why) = 0;

  virtual const World& world() const = 0;
  virtual Options options() const = 0;
  // Sorted members of a process set; empty if there is none of that id.
  virtual std::vector<int> ProcessSetRanks(int id) const = 0;
  virtual std::vector<int> ProcessSetIds() const = 0;
  // The ranks of each host, if sums over all ranks go from host to host. The first rank of each
  // host exchanges them and has the state of methods. Empty if sums go between all ranks.
  virtual std::vector<std::vector<int>> Hosts() const = 0;

  virtual Stats GetStats() const = 0;
  virtual void ResetStats() = 0;

  // The requests with which other ranks wait for this one, as far as they have announced them.
  virtual std::vector<Wanted> GetWanted() const = 0;

  virtual Status StartTimeline(const std::string& path, bool mark_cycles) = 0;
  virtual Status StopTimeline() = 0;

  // The state that exchanges keep between steps, by process set, stream and name, for checkpoints.
  // Call it only while no such request is in flight. The next request takes over what was imported
  // and fails if that does not fit its method.
  virtual std::vector<StateTensor> ExportState(int process_set, uint32_t stream,
                                               const std::string& name) const = 0;
  virtual void ImportState(int process_set, uint32_t stream, const std::string& name,
                           std::vector<StateTensor> tensors) = 0;
  // The results of the stream's last requests were not used (a scaler skipped the step):
  // methods with feedback take them back and send them again.
  virtual void ReturnLast(int process_set, uint32_t stream) = 0;
  virtual void DropStates(int process_set, uint32_t stream) = 0;

  // OK while the engine works; else why it died, or why a request failed because a peer has left.
  virtual Status health() const = 0;

  // What all ranks are doing: each says what it has open, and where its program is. Does not block.
  // `done` is called within five seconds, on the worker's thread, with the ranks that have
  // answered. It is dropped if the engine ends before.
  virtual void Inspect(std::function<void(std::vector<Snapshot>)> done) const = 0;
};

// The one engine of this process, shared by all frameworks in it. In a forked
// child these behave as if Init had not been called.
DAD_EXPORT Status InitProcess(const World& world, const Options& options,
                              std::vector<std::vector<int>> process_sets);
DAD_EXPORT void ShutdownProcess();
DAD_EXPORT std::shared_ptr<Engine> ProcessEngine();  // null before Init and after Shutdown
// The sum of Engine::num_joins over all engines that this process has had. If it has changed, ranks
// may have gone on without each other in between.
DAD_EXPORT int64_t ProcessJoins();

}  // namespace dad
