// The kernels of the collectives of CPU tensors.
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/kernels/call.h"
#include "tf_ops/kernels/collective.h"

namespace dad_tensorflow {
namespace {

struct OnCpu {
  static Status Enter(OpKernelContext*, Call*) { return Status::Ok(); }
};

class Join final : public Collective<OnCpu> {
 public:
  explicit Join(OpKernelConstruction* context) : Collective(context, OpKind::kJoin) {}

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto call = std::make_shared<Call>(context, std::move(done));
    std::vector<Request> requests;
    requests.push_back(MakeRequest(context, 0));
    call->Start(std::move(requests), user_waits(),
                [](OpKernelContext* result, const Call::Tickets& tickets) {
                  Tensor* last = nullptr;
                  absl::Status status = result->allocate_output(0, {}, &last);
                  if (status.ok())
                    last->scalar<int32_t>()() = static_cast<int32_t>(tickets[0]->value());
                  return status;
                });
  }
};

class Barrier final : public Collective<OnCpu> {
 public:
  explicit Barrier(OpKernelConstruction* context) : Collective(context, OpKind::kBarrier) {}

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto call = std::make_shared<Call>(context, std::move(done));
    Request request = prototype();
    request.name = "barrier";
    std::vector<Request> requests;
    requests.push_back(std::move(request));
    call->Start(std::move(requests), user_waits());
  }
};

#define DAD_KERNEL(name, ...) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), __VA_ARGS__)

DAD_KERNEL("DadAllreduce", Elementwise<OnCpu, OpKind::kAllReduce>);
DAD_KERNEL("DadBroadcast", Elementwise<OnCpu, OpKind::kBroadcast>);
DAD_KERNEL("DadAllgather", Gathered<OnCpu, OpKind::kAllGather>);
DAD_KERNEL("DadReducescatter", Gathered<OnCpu, OpKind::kReduceScatter>);
DAD_KERNEL("DadAlltoall", Alltoall<OnCpu>);
DAD_KERNEL("DadBroadcastVariables", BroadcastVariables<OnCpu>);
DAD_KERNEL("DadJoin", Join);
DAD_KERNEL("DadBarrier", Barrier);

}  // namespace
}  // namespace dad_tensorflow
