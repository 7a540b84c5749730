// tensorflow::Tensor <-> dad::TensorView, and statuses of one for statuses of the other.
#pragma once

#include "absl/status/status.h"
#include "dad/export.h"
#include "dad/status.h"
#include "dad/tensor_view.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.pb.h"

namespace dad_tensorflow {

// Exported: the kernels for GPUs are in a library of their own.
DAD_EXPORT dad::Result<dad::DType> ToDType(tensorflow::DataType type);
DAD_EXPORT tensorflow::DataType ToDataType(dad::DType dtype);

// The tensor must live as long as the view, and its type be one of ours.
DAD_EXPORT dad::TensorView ViewOf(const tensorflow::Tensor& tensor);

// Uninitialised memory. Safe on the worker thread, and needs no kernel context: that may be gone.
DAD_EXPORT dad::Result<tensorflow::Tensor> Allocate(tensorflow::Allocator* allocator,
                                                    dad::DType dtype, const dad::Shape& shape);

// Misuse: INVALID_ARGUMENT; ranks disagree: FAILED_PRECONDITION; a rank is lost: UNKNOWN, for which
// scripts that were written for Horovod look.
DAD_EXPORT absl::Status ToTensorFlow(const dad::Status& status);

}  // namespace dad_tensorflow
