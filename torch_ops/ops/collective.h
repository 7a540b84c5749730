// One collective over torch tensors, from arguments to results. Everything that
// Python can ask for goes through Start; the blocking ops and the asynchronous
// handles differ only in when they call Finish.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pytypes.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dad/request.h"
#include "dad/status.h"
#include "dad/ticket.h"

namespace dad_torch {

// What Python says of a request, whatever it carries.
struct RequestTerms {
  std::string name;  // empty: a running number
  std::string method = "none";
  dad::ReduceOp op = dad::ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  int process_set = 0;
  uint32_t stream = 0;
  double scale = 1.0;  // methods other than "none": this rank's weight
};

struct Collective : RequestTerms {
  dad::OpKind kind = dad::OpKind::kAllReduce;
  std::vector<at::Tensor> inputs;
  bool grouped = false;   // inputs are a list to the user, and so are the results
  bool in_place = false;  // allreduce, broadcast: results go to the inputs
  int root_rank = -1;
  std::vector<int64_t> splits;
  // Of each tensor, before it was compressed; empty: none was.
  std::vector<int64_t> uncompressed_bytes;
};

// A collective under way. Used by one thread at a time.
class Pending {
 public:
  static dad::Result<std::unique_ptr<Pending>> Start(Collective collective);
  // A request that is ready to go; `outputs` are its results.
  static dad::Result<std::unique_ptr<Pending>> Submit(dad::Request request,
                                                      std::vector<at::Tensor> outputs);

  // For tensors on a device this includes the device's own work.
  bool Done() const;
  // Blocks, without the GIL, and makes the current stream of the tensors' device wait for the
  // result; raises what a signal handler raised (Ctrl-C). With a timeout
  // that passes first: kTimeout, and Finish may be called again.
  dad::Status Finish(std::optional<double> timeout_seconds = std::nullopt);
  // As Finish, but only waits: false if the time has passed. What went wrong is Finish's to say.
  bool WaitFor(double seconds) { return Await(seconds).code() != dad::StatusCode::kTimeout; }

  // Valid after a successful Finish.
  const std::vector<at::Tensor>& results() const { return outputs_->tensors; }
  const std::vector<int64_t>& received_splits() const { return ticket_->received_splits(); }
  int64_t value() const { return ticket_->value(); }

 private:
  dad::Status Await(std::optional<double> timeout_seconds);

  struct Outputs {
    std::vector<at::Tensor> tensors;
    std::vector<dad::DeviceEvent> events;  // of their memory: before them others used it
  };

  c10::Device device_ = c10::kCPU;  // of all tensors
  dad::OpKind kind_ = dad::OpKind::kAllReduce;
  int process_set_ = 0;
  bool in_place_ = false;
  std::string name_;
  std::shared_ptr<dad::Ticket> ticket_;
  std::shared_ptr<Outputs> outputs_ = std::make_shared<Outputs>();
  // In place on a tensor that is not dense: where the user wants the result, and
  // which output has it.
  std::vector<std::pair<at::Tensor, size_t>> copy_back_;
};

// Called, with the GIL, by threads that have waited for a collective for a while, and again from
// time to time. What it raises ends the wait. Python's None: nobody is called.
void SetWhileWaiting(pybind11::object callback);

// Raises the Python exception for `status`; returns if it is OK.
void ThrowIfError(const dad::Status& status);

}  // namespace dad_torch
