// The kernels of the collectives of CPU tensors.
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "board.h"
#include "call.h"
#include "collective.h"
#include "dad/engine.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace dad_tensorflow {
namespace {

// Numbers for calls without a name: counted per kind and process set, so that ranks inside and
// outside a set stay in step. A new engine, and a join (ranks came to it after different numbers of
// calls), start again at zero.
class RunningNumbers {
 public:
  std::string Next(OpKind kind, int process_set) {
    const std::shared_ptr<dad::Engine> engine = dad::ProcessEngine();
    std::lock_guard lock(mutex_);
    if (engine_.lock() != engine) {
      engine_ = engine;
      next_.clear();
    }
    return std::string("tf.") + dad::Name(kind) + ".noname." +
           std::to_string(next_[{kind, process_set}]++);
  }
  void Restart() {
    std::lock_guard lock(mutex_);
    next_.clear();
  }

 private:
  std::mutex mutex_;
  std::weak_ptr<dad::Engine> engine_;
  std::map<std::pair<OpKind, int>, int64_t> next_;
};

RunningNumbers& Numbers() {
  static auto* numbers = new RunningNumbers;
  return *numbers;
}

struct OnCpu {
  static Status Enter(OpKernelContext*, Call*) { return Status::Ok(); }
  static Result<std::string> NewName(OpKind kind, int process_set) {
    return Numbers().Next(kind, process_set);
  }
};

class Join final : public Collective<OnCpu> {
 public:
  explicit Join(OpKernelConstruction* context) : Collective(context, OpKind::kJoin) {}

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto call = std::make_shared<Call>(context, std::move(done));
    std::vector<Request> requests;
    requests.push_back(MakeRequest(context, 0).value());
    call->Start(std::move(requests), user_waits(),
                [](OpKernelContext* result, const Call::Tickets& tickets) {
                  Numbers().Restart();
                  CountJoin();
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
