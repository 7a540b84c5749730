// Kernels for tensors on a GPU, in a library of their own: it is built where TensorFlow has CUDA,
// and compiled, not linked, elsewhere. Allreduce and broadcast, whose results have the shape of
// their input; TensorFlow copies the others' tensors to the CPU, where they have kernels.
//
// Nothing waits for the device: the core's work comes after what TensorFlow's stream was given, and
// that stream after the core's work.
#include <string>
#include <utility>
#include <vector>

#include "../call.h"
#include "dad/engine.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

namespace dad_tensorflow {
namespace {

using dad::OpKind;
using dad::Request;
using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

template <OpKind kind>
class OnGpu final : public AsyncOpKernel {
 public:
  explicit OnGpu(OpKernelConstruction* context) : AsyncOpKernel(context) {
    prototype_.kind = kind;
    OP_REQUIRES_OK(context, context->GetAttr("names", &names_));
    OP_REQUIRES_OK(context, context->GetAttr("process_set", &prototype_.process_set));
    OP_REQUIRES_OK(context, context->GetAttr("user_waits", &user_waits_));
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
    for (auto [name, scale] : {std::pair{"prescale", &prototype_.prescale},
                               std::pair{"postscale", &prototype_.postscale}}) {
      if (!context->HasAttr(name)) continue;
      std::string text;
      OP_REQUIRES_OK(context, context->GetAttr(name, &text));
      *scale = std::strtod(text.c_str(), nullptr);
    }
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto call = std::make_shared<Call>(context, std::move(done));
    const auto* info = context->device()->tensorflow_accelerator_device_info();
    if (info == nullptr || context->op_device_context() == nullptr ||
        context->op_device_context()->stream() == nullptr) {
      return call->Fail(dad::Status::Internal("a GPU kernel without a stream"));
    }
    call->UseStream(info->gpu_id,
                    context->op_device_context()->stream()->platform_specific_handle().stream);
    std::vector<Request> requests;
    const bool together = names_.size() <= 1;
    for (int i = 0; i < context->num_inputs(); ++i) {
      if (requests.empty() || !together) {
        requests.push_back(prototype_);
        const auto index = static_cast<size_t>(i);
        if (index >= names_.size() || names_[index].empty()) {
          // The counters of unnamed calls are the CPU kernels' own.
          return call->Fail(dad::Status::InvalidArgument(
              "a collective on a GPU needs a name; give one with name="));
        }
        requests.back().name = names_[index];
      }
      auto contribution = call->Elementwise(i);
      if (!contribution.ok()) return call->Fail(contribution.status());
      requests.back().tensors.push_back(std::move(contribution).value());
    }
    call->Start(std::move(requests), user_waits_);
  }

 private:
  Request prototype_;
  std::vector<std::string> names_;
  bool user_waits_ = false;
};

REGISTER_KERNEL_BUILDER(Name("DadAllreduce").Device(tensorflow::DEVICE_GPU),
                        OnGpu<OpKind::kAllReduce>);
REGISTER_KERNEL_BUILDER(Name("DadBroadcast").Device(tensorflow::DEVICE_GPU),
                        OnGpu<OpKind::kBroadcast>);

}  // namespace
}  // namespace dad_tensorflow
