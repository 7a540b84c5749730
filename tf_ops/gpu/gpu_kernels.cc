// Kernels for tensors on a GPU, in a library of their own: it is loaded where TensorFlow has CUDA.
// Every collective of tensors and of variables. TensorFlow copies those of exchanges by a method to
// the CPU, where they have kernels: numbers that these look at come among their tensors.
//
// Nothing waits for the device: the core's work comes after what TensorFlow's stream was given, and
// that stream after the core's work.
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/kernels/call.h"
#include "tf_ops/kernels/collective.h"
#include "xla/stream_executor/stream.h"

namespace dad_tensorflow {
namespace {

struct OnGpu {
  static Status Enter(OpKernelContext* context, Call* call) {
    const auto* info = context->device()->tensorflow_accelerator_device_info();
    if (info == nullptr || context->op_device_context() == nullptr ||
        context->op_device_context()->stream() == nullptr) {
      return Status::Internal("a GPU kernel without a stream");
    }
    call->UseStream(info->gpu_id,
                    context->op_device_context()->stream()->platform_specific_handle().stream);
    return Status::Ok();
  }
};

#define DAD_GPU(name) Name(name).Device(tensorflow::DEVICE_GPU)

REGISTER_KERNEL_BUILDER(DAD_GPU("DadAllreduce"), Elementwise<OnGpu, OpKind::kAllReduce>);
REGISTER_KERNEL_BUILDER(DAD_GPU("DadBroadcast"), Elementwise<OnGpu, OpKind::kBroadcast>);
REGISTER_KERNEL_BUILDER(DAD_GPU("DadAllgather"), Gathered<OnGpu, OpKind::kAllGather>);
REGISTER_KERNEL_BUILDER(DAD_GPU("DadReducescatter"), Gathered<OnGpu, OpKind::kReduceScatter>);
REGISTER_KERNEL_BUILDER(DAD_GPU("DadAlltoall").HostMemory("splits").HostMemory("received_splits"),
                        Alltoall<OnGpu>);
REGISTER_KERNEL_BUILDER(DAD_GPU("DadBroadcastVariables").HostMemory("resources"),
                        BroadcastVariables<OnGpu>);

}  // namespace
}  // namespace dad_tensorflow
