// rank, size and the like as ops: asked when the graph runs, not when it is built.
#include <algorithm>
#include <vector>

#include "dad/engine.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace dad_tensorflow {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// What the op for membership answers where there is nothing to be a member of.
constexpr int kNotInitialized = -1;
constexpr int kNoSuchSet = -4;

int Rank(const dad::Engine& engine, int) { return engine.world().rank; }
int LocalRank(const dad::Engine& engine, int) { return engine.world().local_rank; }
int LocalSize(const dad::Engine& engine, int) { return engine.world().local_size; }
int Size(const dad::Engine& engine, int process_set) {
  return static_cast<int>(engine.ProcessSetRanks(process_set).size());
}
int Included(const dad::Engine& engine, int process_set) {
  const std::vector<int> ranks = engine.ProcessSetRanks(process_set);
  if (ranks.empty()) return kNoSuchSet;
  return std::find(ranks.begin(), ranks.end(), engine.world().rank) != ranks.end() ? 1 : 0;
}

template <int (*Ask)(const dad::Engine&, int)>
class World final : public OpKernel {
 public:
  explicit World(OpKernelConstruction* context) : OpKernel(context) {
    if (context->HasAttr("process_set")) {
      OP_REQUIRES_OK(context, context->GetAttr("process_set", &process_set_));
    }
  }

  void Compute(OpKernelContext* context) override {
    const std::shared_ptr<dad::Engine> engine = dad::ProcessEngine();
    int answer = kNotInitialized;
    if (engine) {
      answer = Ask(*engine, process_set_);
    } else {
      OP_REQUIRES(context, Ask == &Included,
                  absl::InvalidArgumentError("dad has not been initialized; call init() first"));
    }
    tensorflow::Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<int32_t>()() = answer;
  }

 private:
  int process_set_ = 0;
};

#define DAD_KERNEL(name, ask) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), World<&ask>)

DAD_KERNEL("DadRank", Rank);
DAD_KERNEL("DadSize", Size);
DAD_KERNEL("DadLocalRank", LocalRank);
DAD_KERNEL("DadLocalSize", LocalSize);
DAD_KERNEL("DadProcessSetIncluded", Included);

}  // namespace
}  // namespace dad_tensorflow
