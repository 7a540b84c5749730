// The kernels that a step of an optimizer or tape begins and ends with: its plan, and what is done
// where its results were not used.
#include <cstdint>
#include <utility>
#include <vector>

#include "tf_ops/kernels/method_kernel.h"

namespace dad_tensorflow {
namespace {

class Plan final : public AsyncOpKernel {
 public:
  explicit Plan(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("board", &board_));
    OP_REQUIRES_OK(context, context->GetAttr("trace", &trace_));
    OP_REQUIRES_OK(context, context->GetAttr("pairs", &pairs_));
    OP_REQUIRES_OK(context, context->GetAttr("has_rows", &has_rows_));
    OP_REQUIRES(context, pairs_.size() == has_rows_.size(),
                absl::InvalidArgumentError("pairs and has_rows differ in length"));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto board = FindBoard(board_);
    OP_REQUIRES_ASYNC(context, board != nullptr, ToTensorFlow(NoBoard()), done);
    const auto flat = context->input(0).flat<int64_t>();
    std::vector<int64_t> counts(flat.data(), flat.data() + flat.size());
    board->Begin(trace_, std::move(counts), [this, board, context, done](const Status& status) {
      if (status.code() == dad::StatusCode::kFailedPrecondition) {
        // Other tensors of the step need no plan, and may have been sent.
        if (const auto engine = dad::ProcessEngine()) engine->GiveUp(StepOf(context), status);
      }
      OP_REQUIRES_ASYNC(context, status.ok(), ToTensorFlow(status), done);
      Tensor* as_rows = nullptr;
      Tensor* in_chain = nullptr;
      const tensorflow::TensorShape shape({static_cast<int64_t>(pairs_.size())});
      OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, shape, &as_rows), done);
      OP_REQUIRES_OK_ASYNC(context, context->allocate_output(1, shape, &in_chain), done);
      Tensor* compares = nullptr;
      OP_REQUIRES_OK_ASYNC(context, context->allocate_output(2, {}, &compares), done);
      compares->scalar<bool>()() = board->TakeCompare();
      for (size_t i = 0; i < pairs_.size(); ++i) {
        const PairWays ways = board->Ways(pairs_[i]);
        as_rows->vec<bool>()(static_cast<int64_t>(i)) = has_rows_[i] && ways.weight.as_rows;
        in_chain->vec<bool>()(static_cast<int64_t>(i)) = has_rows_[i] && ways.in_chain;
      }
      done();
    });
  }

 private:
  int64_t board_ = 0;
  int64_t trace_ = 0;
  std::vector<int> pairs_;
  std::vector<bool> has_rows_;
};

class ReturnLast final : public tensorflow::OpKernel {
 public:
  explicit ReturnLast(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("process_set", &process_set_));
    OP_REQUIRES_OK(context, context->GetAttr("stream", &stream_));
  }

  void Compute(OpKernelContext* context) override {
    const std::shared_ptr<dad::Engine> engine = dad::ProcessEngine();
    if (engine && !context->input(0).scalar<bool>()()) {
      engine->ReturnLast(process_set_, static_cast<uint32_t>(stream_));
    }
  }

 private:
  int process_set_ = 0;
  int64_t stream_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("DadPlan").Device(tensorflow::DEVICE_CPU), Plan);
REGISTER_KERNEL_BUILDER(Name("DadReturnLast").Device(tensorflow::DEVICE_CPU), ReturnLast);

}  // namespace
}  // namespace dad_tensorflow
