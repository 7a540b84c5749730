// An Exchange turns all ranks' contributions to one tensor into its result, in
// one or more rounds. In a round it says which bytes go to which peer, then takes
// the bytes that came. It knows no transport: the executor fuses the rounds of
// many tensors into one message per peer.
//
// One Exchange serves one tensor (or a slice of it) and may keep that tensor's
// state between steps (residual, variance, warm start). Only the worker thread
// calls it: no lock. The order of calls in a step is
//   Begin, { Send to each peer, Receive } x num_rounds, Finish
// or Begin, ..., Cancel.
//
// An exchange that computes on a device enqueues its work on a stream and returns. Ready tells when
// there is something to send, device_event when the device has finished.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dad/device.h"
#include "dad/method.h"
#include "dad/request.h"
#include "dad/status.h"
#include "linalg/cpu_level.h"
#include "util/gather_buffer.h"

namespace dad {

class DeviceBench;
class StateStore;

// Who takes part. Ranks here count within the process set: 0 .. size-1.
struct Group {
  int rank = 0;
  int size = 1;
  // Ranks that have joined: they have no tensor of this name. They contribute
  // nothing (zeros, no rows), but serve as owners like everybody else.
  std::vector<bool> joined;

  bool Joined(int r) const { return !joined.empty() && joined[static_cast<size_t>(r)]; }
};

// What all ranks agree on about one tensor. For allgather and alltoall the first
// dimension of `shape` is this rank's own and travels with the data.
struct TensorSpec {
  std::string name;
  OpKind kind = OpKind::kAllReduce;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;
  Shape shape;
  int root = -1;  // rank within the group
  double prescale = 1.0;
  double postscale = 1.0;
  Method method;
  uint32_t stream = 0;  // with the name: whose state it is
  // The data goes from device to device: the exchange only agrees on the order (order.h).
  bool on_device = false;
  DeviceType device = DeviceType::kCpu;  // where the tensors are, on every rank
};

// A range of elements of an elementwise exchange: big tensors travel in slices.
struct Slice {
  int64_t begin = 0;
  int64_t count = 0;
};

// What an exchange tells about a step besides its result.
struct StepReport {
  bool replan = false;       // some rank asks for a new plan; the same on every rank
  bool too_large = false;    // some rank's share would have been larger than dense's
  bool not_finite = false;   // some rank's contribution was; all got NaN and no state changed
  int not_finite_rank = -1;  // the first of them, where the exchange knows
  // For methods that do not change values: a rank whose contribution is known here to be not
  // finite; -1: none.
  int suspect = -1;
  double effective = -1.0;  // the rank of what was applied, or the share of elements sent
  double captured = -1.0;   // see TensorStats
};

// This rank's part in one step. Pointers stay valid from Begin to Finish/Cancel.
struct StepInput {
  const Contribution* mine = nullptr;  // null: this rank has joined
  // Asks for the output of kinds whose shape is known only at the end.
  std::function<Result<TensorView>(const Shape&)> allocate;
  // alltoall writes here what it got from each rank.
  std::vector<int64_t>* received_splits = nullptr;
  StepReport* report = nullptr;  // may be null
  // Identifies the submit: a step that was cancelled begins again with the same number.
  uint64_t submit_id = 0;
};

// For data that the device moves: work of one process set is enqueued in the order of these
// numbers, which is the same on every rank. A batch takes one number per part.
struct DeviceTurn {
  // The rows that this rank sends to one member, and receives from it.
  struct Rows {
    int64_t send_begin = 0;
    int64_t send_count = 0;
    int64_t receive_begin = 0;
    int64_t receive_count = 0;
  };

  TensorSpec spec;
  uint64_t number = 0;
  std::vector<Rows> rows;  // allgather and alltoall: by member; of joined ones none
  TensorView output;       // of kinds whose output is made when its shape is known
  bool failed = false;     // some rank could not make its output: no rank does any of it
};

class Exchange {
 public:
  virtual ~Exchange() = default;

  // Does local work on this rank's contribution while the tensor's batch still waits for others.
  // Begin follows with the same submit_id, on this exchange or on another one for the same tensor.
  // Only exchanges whose Begin takes long implement it.
  virtual void Prepare(const StepInput& input, const Group& group) { (void)input, (void)group; }

  // Takes this step's contribution. On error the state is as before the call.
  virtual Status Begin(const StepInput& input, const Group& group) = 0;

  // Rounds of this step; the same on every rank. At least 1.
  virtual int num_rounds() const = 0;

  // For exchanges that compute on a device, before the first Send of a round: null when the bytes
  // are there, else an event. Called again after that event, until it returns null. An error ends
  // the engine.
  virtual Result<DeviceEvent> Ready(int round) {
    (void)round;
    return DeviceEvent();
  }
  // The device that the step computes on; -1: the host.
  virtual int device() const { return -1; }
  // An event after all work that the step has enqueued on the device; null: there is none.
  virtual DeviceEvent device_event() const { return nullptr; }

  // Appends what this rank sends to `peer` in `round`; nothing is a valid answer.
  // What is referenced, not copied, must stay unchanged until the next Begin, also when the step
  // was finished or cancelled: bytes may still be on their way. The exchange outlives
  // them; buffers freed earlier must be owned by the message (GatherBuffer::Hold).
  virtual Status Send(int round, int peer, GatherBuffer& out) = 0;

  // Bytes that `peer` sends us in `round` when both sides know it beforehand,
  // -1 when the message has to say so.
  virtual int64_t ReceiveBytes(int round, int peer) const = 0;

  // Whether a message to `peer` in `round` has to carry its length, that is, whether the peer's
  // ReceiveBytes for this rank is -1.
  virtual bool SendsLength(int round, int peer) const {
    (void)round, (void)peer;
    return false;
  }

  // Memory that the bytes of `peer` in `round` may be written into as they come,
  // ReceiveBytes() long, or empty. Called only for rounds > 0, when every
  // rank has committed to the step. Receive is still called, with a share that points there.
  virtual std::span<std::byte> Destination(int round, int peer) {
    (void)round, (void)peer;
    return {};
  }

  // Whether `from` sends `to` anything in `round`, the same answer on both. Called
  // only for rounds > 0: the first round goes to all members, since it signals agreement.
  virtual bool Speaks(int round, int from, int to) const {
    (void)round, (void)from, (void)to;
    return true;
  }

  // Takes what came in `round`, one share per rank (ours is empty). Shares are
  // valid during the call only. InvalidArgument if a share is malformed.
  virtual Status Receive(int round, std::span<const ByteSpan> shares) = 0;

  // Writes the result: the same bits on every rank.
  virtual Status Finish() = 0;

  // Forgets the step that was begun: the state is as before Begin. Called only
  // when no round has been received.
  virtual void Cancel() {}

  // The place of the data in the device's order, for exchanges that move no data; null for others.
  virtual const DeviceTurn* device_turn() const { return nullptr; }
};

// What exchanges share in a process set.
struct ExchangeEnv {
  int process_set = 0;
  int64_t direct_bytes = 0;  // dense batches up to this size go in one round instead of two
  // The instructions that all ranks have: where every rank repeats a computation, the bits
  // must be the same.
  CpuLevel cpu_level = CpuLevel::kBaseline;
  StateStore* states = nullptr;     // null: nothing is kept (a set of one rank)
  int threads = 1;                  // that may work on one large tensor
  bool device_collectives = false;  // all ranks have them
  uint64_t* next_turn = nullptr;    // of the process set: counts on its first member
  int64_t ring_bytes = 0;           // dense tensors from this size on go around a ring; 0: none
  bool pack = false;                // dense pieces (packed_piece.h) and factors are packed
  // What methods of device tensors are computed with, where all ranks have it; null: on the host.
  std::shared_ptr<DeviceBench> bench;
  bool device_products = false;  // all ranks' products have the same bits
};

// The exchange for a spec; `slice` is the whole tensor for kinds that cannot be
// cut. `batch_bytes` is the size of everything that travels with it, which decides
// between one round and two for small dense sums.
Result<std::unique_ptr<Exchange>> MakeExchange(const TensorSpec& spec, Slice slice,
                                               int64_t batch_bytes, const ExchangeEnv& env);

// Whether a method is computed on the device: the same on every rank.
bool ComputesOnDevice(const TensorSpec& spec, const ExchangeEnv& env);
// And whether every rank has to: a rank whose tensors are elsewhere cannot take part.
bool MustComputeOnDevice(const TensorSpec& spec, const ExchangeEnv& env);
// Whether this rank's contribution can be used where it is; else it goes by way of the host, which
// the exchange accepts as well.
bool TakesFromDevice(const TensorSpec& spec, const Contribution& mine, const ExchangeEnv& env);

// True when the spec can be cut into slices of elements.
bool IsElementwise(const TensorSpec& spec);

// The approximate number of bytes on the wire, for the fuser; the same on every rank.
int64_t ExpectedBytes(const TensorSpec& spec);

// How much of a batch a tensor fills that cannot be cut. With a method more than its bytes on the
// wire, where the gradient that they stand for is large (MethodRow::dense_per_batch).
int64_t FusedBytes(const TensorSpec& spec);

}  // namespace dad
