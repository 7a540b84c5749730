// One run of a collective kernel, from its inputs to `done`.
//
// The core cannot take a request back, so a step that is cancelled ends at once and leaves its
// memory to the request: a Call holds what the views point to until both are through.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "dad/device.h"
#include "dad/engine.h"
#include "dad/export.h"
#include "dad/request.h"
#include "dad/status.h"
#include "dad/ticket.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/kernels/tensor_adapter.h"

namespace dad_tensorflow {

// A run of a graph, as dad::Request::step has it.
uint64_t StepOf(const tensorflow::OpKernelContext* context);

class DAD_EXPORT Call : public std::enable_shared_from_this<Call> {
 public:
  Call(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done);

  // The tensors are on that device, made by what `stream` (a cudaStream_t) was given so far, and
  // the results are used by what it is given after `done`. Before anything else.
  void UseStream(int device, void* stream);

  // Input number `input` with a result of its shape, which becomes output number `input`: in the
  // memory of the input where nobody else has it.
  dad::Result<dad::Contribution> Elementwise(int input);
  // The same without a result: the core asks Allocator() for one when it knows the shape.
  dad::Result<dad::Contribution> Gathered(int input);
  // For request.allocate: tensor i of the request becomes output number `first_output` + i.
  dad::OutputAllocator Allocator(int first_output = 0);
  // Memory where the call's tensors are.
  dad::Result<tensorflow::Tensor> NewTensor(dad::DType dtype, const dad::Shape& shape) const {
    return Allocate(allocator_, dtype, shape);
  }
  // Holds a tensor until the requests are done.
  void Hold(tensorflow::Tensor tensor) { held_.push_back(std::move(tensor)); }

  // Sends the requests. `done` is called once all have ended or the step is cancelled.
  // `on_success` may set outputs; it gets the tickets in the order of the requests.
  using Tickets = dad::Engine::Tickets;
  using OnSuccess = std::function<absl::Status(tensorflow::OpKernelContext*, const Tickets&)>;
  // `on_error` is called before `done` where the requests have ended otherwise.
  using OnError = std::function<void(const dad::Status&)>;
  void Start(std::vector<dad::Request> requests, bool user_waits, OnSuccess on_success = nullptr,
             OnError on_error = nullptr);

  // Ends the call with an error.
  void Fail(const dad::Status& status);

 private:
  dad::Status SetReady(std::vector<dad::Request>& requests);
  void SetStep(std::vector<dad::Request>& requests, bool user_waits);
  void Submit(const std::shared_ptr<dad::Engine>& engine, std::vector<dad::Request> requests,
              bool user_waits);
  void PartDone(size_t place, const std::shared_ptr<dad::Ticket>& ticket,
                const dad::Status& status);
  void LosePatience(std::chrono::steady_clock::time_point begin,
                    std::chrono::steady_clock::duration patience,
                    std::chrono::steady_clock::duration after);
  void Finish(const absl::Status& status, bool ended);

  tensorflow::OpKernelContext* const context_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  OnSuccess on_success_;
  OnError on_error_;
  Tickets tickets_;  // by request; guarded by mutex_ until all have ended
  std::vector<tensorflow::Tensor> held_;
  std::vector<std::optional<tensorflow::Tensor>> gathered_;  // by output; what Allocator() made
  tensorflow::CancellationManager* cancellation_ = nullptr;
  tensorflow::CancellationToken token_ = 0;
  std::weak_ptr<dad::Engine> engine_;
  uint64_t step_ = 0;
  int device_ = -1;  // -1: the host
  void* stream_ = nullptr;
  tensorflow::Allocator* allocator_ = tensorflow::cpu_allocator();
  std::vector<dad::DeviceEvent> allocated_;  // of results on a device; by the worker
  std::atomic<bool> finished_{false};
  std::mutex mutex_;
  size_t num_open_ = 0;      // guarded by mutex_
  dad::Status first_error_;  // guarded by mutex_
};

}  // namespace dad_tensorflow
