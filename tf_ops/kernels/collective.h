// The kernels of the collectives, for tensors on the CPU (collective_kernels.cc) and on a GPU
// (gpu/gpu_kernels.cc). None blocks a thread of TensorFlow's pools: the core calls back.
//
// A Place says where the tensors are:
//   static dad::Status Enter(OpKernelContext*, Call*)      before a call has any tensor
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dad/engine.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tf_ops/kernels/call.h"
#include "tf_ops/kernels/tensor_adapter.h"

namespace dad_tensorflow {

using dad::Contribution;
using dad::OpKind;
using dad::Request;
using dad::Result;
using dad::Status;
using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// What the attributes say.
template <typename Place>
class Collective : public AsyncOpKernel {
 public:
  Collective(OpKernelConstruction* context, OpKind kind) : AsyncOpKernel(context) {
    prototype_.kind = kind;
    if (context->HasAttr("uncompressed_bytes")) {
      OP_REQUIRES_OK(context, context->GetAttr("uncompressed_bytes", &uncompressed_bytes_));
    }
    if (context->HasAttr("names")) OP_REQUIRES_OK(context, context->GetAttr("names", &names_));
    if (context->HasAttr("process_set")) {
      OP_REQUIRES_OK(context, context->GetAttr("process_set", &prototype_.process_set));
    }
    if (context->HasAttr("stream")) {
      int64_t stream = 0;
      OP_REQUIRES_OK(context, context->GetAttr("stream", &stream));
      prototype_.stream = static_cast<uint32_t>(stream);
    }
    if (context->HasAttr("reduce_op")) {
      int op = 0;
      OP_REQUIRES_OK(context, context->GetAttr("reduce_op", &op));
      prototype_.op = static_cast<dad::ReduceOp>(op);
    }
    if (context->HasAttr("root_rank")) {
      OP_REQUIRES_OK(context, context->GetAttr("root_rank", &prototype_.root_rank));
    }
    Scale(context, "prescale", &prototype_.prescale);
    Scale(context, "postscale", &prototype_.postscale);
    OP_REQUIRES_OK(context, context->GetAttr("user_waits", &user_waits_));
  }

 protected:
  Request MakeRequest(const OpKernelContext* context, size_t index) const {
    Request request = prototype_;
    // Without a name: eager, so outside of any loop. The engine numbers it.
    if (index >= names_.size() || names_[index].empty()) return request;
    request.name = names_[index];
    // Iterations of a tf.while_loop may overlap.
    constexpr int64_t kMaxParallelIterations = 64;
    if (const auto iteration = context->frame_iter().iter_id; iteration > 0) {
      request.name += "#" + std::to_string(iteration % kMaxParallelIterations);
    }
    return request;
  }

  // One request for all inputs, or one for each where each has a name.
  template <typename Contribute>
  Result<std::vector<Request>> Requests(const OpKernelContext* context, int num_inputs,
                                        Contribute contribute) const {
    std::vector<Request> requests;
    const bool together = names_.size() <= 1;
    for (int i = 0; i < num_inputs; ++i) {
      if (requests.empty() || !together) {
        requests.push_back(MakeRequest(context, static_cast<size_t>(i)));
      }
      Result<Contribution> contribution = contribute(i, requests.back());
      if (!contribution.ok()) return contribution.status();
      if (const auto place = static_cast<size_t>(i); place < uncompressed_bytes_.size()) {
        contribution.value().uncompressed_bytes = uncompressed_bytes_[place];
      }
      requests.back().tensors.push_back(std::move(contribution).value());
    }
    return requests;
  }

  bool user_waits() const { return user_waits_; }
  const Request& prototype() const { return prototype_; }

 private:
  static void Scale(OpKernelConstruction* context, const char* name, double* scale) {
    if (!context->HasAttr(name)) return;
    std::string text;
    OP_REQUIRES_OK(context, context->GetAttr(name, &text));
    *scale = std::strtod(text.c_str(), nullptr);
  }

  Request prototype_;
  std::vector<std::string> names_;
  std::vector<int64_t> uncompressed_bytes_;
  bool user_waits_ = false;
};

// allreduce, broadcast: the result has the shape of the input.
template <typename Place, OpKind kind>
class Elementwise final : public Collective<Place> {
 public:
  explicit Elementwise(OpKernelConstruction* context) : Collective<Place>(context, kind) {}

  void ComputeAsync(OpKernelContext* context, AsyncOpKernel::DoneCallback done) override {
    auto call = std::make_shared<Call>(context, std::move(done));
    if (const Status entered = Place::Enter(context, call.get()); !entered.ok()) {
      return call->Fail(entered);
    }
    auto requests = this->Requests(context, context->num_inputs(),
                                   [&](int i, Request&) { return call->Elementwise(i); });
    if (!requests.ok()) return call->Fail(requests.status());
    call->Start(std::move(requests).value(), this->user_waits());
  }
};

// allgather, reducescatter: the core says how many rows come out.
template <typename Place, OpKind kind>
class Gathered final : public Collective<Place> {
 public:
  explicit Gathered(OpKernelConstruction* context) : Collective<Place>(context, kind) {}

  void ComputeAsync(OpKernelContext* context, AsyncOpKernel::DoneCallback done) override {
    auto call = std::make_shared<Call>(context, std::move(done));
    if (const Status entered = Place::Enter(context, call.get()); !entered.ok()) {
      return call->Fail(entered);
    }
    auto requests = this->Requests(context, context->num_inputs(), [&](int i, Request& request) {
      if (!request.allocate) request.allocate = call->Allocator(i);
      return call->Gathered(i);
    });
    if (!requests.ok()) return call->Fail(requests.status());
    call->Start(std::move(requests).value(), this->user_waits());
  }
};

// The splits are on the CPU.
template <typename Place>
class Alltoall final : public Collective<Place> {
 public:
  explicit Alltoall(OpKernelConstruction* context)
      : Collective<Place>(context, OpKind::kAllToAll) {}

  void ComputeAsync(OpKernelContext* context, AsyncOpKernel::DoneCallback done) override {
    auto call = std::make_shared<Call>(context, std::move(done));
    if (const Status entered = Place::Enter(context, call.get()); !entered.ok()) {
      return call->Fail(entered);
    }
    Request request = this->MakeRequest(context, 0);
    auto contribution = call->Gathered(0);
    if (!contribution.ok()) return call->Fail(contribution.status());
    const auto splits = context->input(1).flat<int32_t>();
    for (int64_t i = 0; i < splits.size(); ++i) contribution.value().splits.push_back(splits(i));
    request.tensors.push_back(std::move(contribution).value());
    request.allocate = call->Allocator();
    std::vector<Request> requests;
    requests.push_back(std::move(request));
    call->Start(std::move(requests), this->user_waits(),
                [](OpKernelContext* result, const Call::Tickets& tickets) {
                  const std::vector<int64_t>& received = tickets[0]->received_splits();
                  Tensor* rows = nullptr;
                  absl::Status status = result->allocate_output(
                      1, tensorflow::TensorShape({static_cast<int64_t>(received.size())}), &rows);
                  if (!status.ok()) return status;
                  auto values = rows->flat<int32_t>();
                  for (size_t i = 0; i < received.size(); ++i) {
                    values(static_cast<int64_t>(i)) = static_cast<int32_t>(received[i]);
                  }
                  return status;
                });
  }
};

// Writes into the memory of the variable where nobody else reads it, else gives it new memory.
template <typename Place>
class BroadcastVariables final : public Collective<Place> {
 public:
  explicit BroadcastVariables(OpKernelConstruction* context)
      : Collective<Place>(context, OpKind::kBroadcast) {}

  void ComputeAsync(OpKernelContext* context, AsyncOpKernel::DoneCallback done) override {
    auto call = std::make_shared<Call>(context, std::move(done));
    if (const Status entered = Place::Enter(context, call.get()); !entered.ok()) {
      return call->Fail(entered);
    }
    auto replaced = std::make_shared<std::vector<Replacement>>();
    auto requests = this->Requests(context, context->num_inputs(), [&](int i, Request&) {
      return Contribute(context, i, call.get(), replaced.get());
    });
    if (!requests.ok()) return call->Fail(requests.status());
    call->Start(std::move(requests).value(), this->user_waits(),
                [replaced](OpKernelContext*, const Call::Tickets&) {
                  for (Replacement& replacement : *replaced) {
                    tensorflow::mutex_lock lock(*replacement.variable->mu());
                    *replacement.variable->tensor() = replacement.value;
                  }
                  return absl::OkStatus();
                });
  }

 private:
  struct Replacement {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    Tensor value;
  };

  static Result<Contribution> Contribute(OpKernelContext* context, int i, Call* call,
                                         std::vector<Replacement>* replaced) {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    const absl::Status found =
        tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, i), &variable);
    if (!found.ok()) return Status::InvalidArgument(std::string(found.message()));
    tensorflow::mutex_lock lock(*variable->mu());
    Tensor* tensor = variable->tensor();
    if (!variable->is_initialized && tensor->NumElements() == 0) {
      return Status::InvalidArgument("a variable has not been initialized");
    }
    auto dtype = ToDType(tensor->dtype());
    if (!dtype.ok()) return dtype.status();
    Contribution contribution;
    contribution.input = ViewOf(*tensor);
    contribution.output = contribution.input;
    const bool unshared = tensor->RefCountIsOne();
    call->Hold(*tensor);
    if (!unshared) {
      Result<Tensor> fresh = call->NewTensor(dtype.value(), contribution.input.shape);
      if (!fresh.ok()) return fresh.status();
      contribution.output = ViewOf(fresh.value());
      replaced->push_back({std::move(variable), std::move(fresh).value()});
    }
    return contribution;
  }
};

}  // namespace dad_tensorflow
