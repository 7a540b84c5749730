#include "tf_ops/kernels/tensor_adapter.h"

#include <string>

#include "tensorflow/core/framework/types.h"

namespace dad_tensorflow {

using dad::DType;
using dad::Result;
using dad::Status;

Result<DType> ToDType(tensorflow::DataType type) {
  switch (type) {
    case tensorflow::DT_UINT8: return DType::kUint8;
    case tensorflow::DT_INT8: return DType::kInt8;
    case tensorflow::DT_INT16: return DType::kInt16;
    case tensorflow::DT_INT32: return DType::kInt32;
    case tensorflow::DT_INT64: return DType::kInt64;
    case tensorflow::DT_HALF: return DType::kFloat16;
    case tensorflow::DT_BFLOAT16: return DType::kBFloat16;
    case tensorflow::DT_FLOAT: return DType::kFloat32;
    case tensorflow::DT_DOUBLE: return DType::kFloat64;
    case tensorflow::DT_BOOL: return DType::kBool;
    case tensorflow::DT_UINT16: return DType::kUint16;
    default:
      return Status::InvalidArgument("dtype " + tensorflow::DataTypeString(type) +
                                     " is not supported; convert the tensor first");
  }
}

tensorflow::DataType ToDataType(DType dtype) {
  switch (dtype) {
    case DType::kUint8: return tensorflow::DT_UINT8;
    case DType::kInt8: return tensorflow::DT_INT8;
    case DType::kInt16: return tensorflow::DT_INT16;
    case DType::kInt32: return tensorflow::DT_INT32;
    case DType::kInt64: return tensorflow::DT_INT64;
    case DType::kFloat16: return tensorflow::DT_HALF;
    case DType::kBFloat16: return tensorflow::DT_BFLOAT16;
    case DType::kFloat32: return tensorflow::DT_FLOAT;
    case DType::kFloat64: return tensorflow::DT_DOUBLE;
    case DType::kBool: return tensorflow::DT_BOOL;
    case DType::kUint16: return tensorflow::DT_UINT16;
  }
  return tensorflow::DT_INVALID;
}

dad::TensorView ViewOf(const tensorflow::Tensor& tensor) {
  dad::TensorView view;
  view.data = tensor.data();
  view.dtype = ToDType(tensor.dtype()).value();
  for (int i = 0; i < tensor.dims(); ++i) view.shape.push_back(tensor.dim_size(i));
  return view;
}

Result<tensorflow::Tensor> Allocate(tensorflow::Allocator* allocator, DType dtype,
                                    const dad::Shape& shape) {
  tensorflow::TensorShape dims;
  for (int64_t size : shape) {
    if (!dims.AddDimWithStatus(size).ok()) {
      return Status::InvalidArgument("a result of shape " + dad::ToString(shape) + " is too large");
    }
  }
  tensorflow::Tensor tensor(allocator, ToDataType(dtype), dims);
  if (!tensor.IsInitialized()) {
    return Status::InvalidArgument("no memory for a result of shape " + dad::ToString(shape));
  }
  return tensor;
}

absl::Status ToTensorFlow(const Status& status) {
  switch (status.code()) {
    case dad::StatusCode::kOk: return absl::OkStatus();
    case dad::StatusCode::kInvalidArgument: return absl::InvalidArgumentError(status.message());
    case dad::StatusCode::kFailedPrecondition:
      return absl::FailedPreconditionError(status.message());
    default: return absl::UnknownError(status.message());
  }
}

}  // namespace dad_tensorflow
