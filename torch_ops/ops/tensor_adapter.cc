#include "torch_ops/ops/tensor_adapter.h"

#include <ATen/EmptyTensor.h>

#include <string>

#include "torch_ops/device/device_stream.h"

namespace dad_torch {

using dad::DType;
using dad::Result;
using dad::Status;

Result<DType> ToDType(at::ScalarType type) {
  switch (type) {
    case at::kByte: return DType::kUint8;
    case at::kChar: return DType::kInt8;
    case at::kShort: return DType::kInt16;
    case at::kInt: return DType::kInt32;
    case at::kLong: return DType::kInt64;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kBool: return DType::kBool;
    case at::kUInt16: return DType::kUint16;
    default:
      return Status::InvalidArgument(std::string("dtype ") + c10::toString(type) +
                                     " is not supported; convert the tensor first, to uint8, int8, "
                                     "uint16, int16, int32, int64, float16, bfloat16, float32, "
                                     "float64 or bool");
  }
}

at::ScalarType ToScalarType(DType dtype) {
  switch (dtype) {
    case DType::kUint8: return at::kByte;
    case DType::kInt8: return at::kChar;
    case DType::kInt16: return at::kShort;
    case DType::kInt32: return at::kInt;
    case DType::kInt64: return at::kLong;
    case DType::kFloat16: return at::kHalf;
    case DType::kBFloat16: return at::kBFloat16;
    case DType::kFloat32: return at::kFloat;
    case DType::kFloat64: return at::kDouble;
    case DType::kBool: return at::kBool;
    case DType::kUint16: return at::kUInt16;
  }
  return at::kByte;
}

Result<at::Tensor> Dense(const at::Tensor& tensor) {
  if (!tensor.defined()) return Status::InvalidArgument("a tensor is undefined");
  if (tensor.layout() != at::kStrided) {
    return Status::InvalidArgument(
        "a sparse tensor cannot be sent as it is; use sparse_allreduce_async or to_dense()");
  }
  if (Status status = CheckDevice(tensor.device()); !status.ok()) return status;
  if (auto dtype = ToDType(tensor.scalar_type()); !dtype.ok()) return dtype.status();
  if (tensor.is_contiguous() && !tensor.is_neg()) return tensor;
  return tensor.detach().resolve_neg().contiguous();
}

dad::TensorView ViewOf(const at::Tensor& dense) {
  dad::TensorView view;
  view.data = dense.data_ptr();
  view.dtype = ToDType(dense.scalar_type()).value();
  view.shape.assign(dense.sizes().begin(), dense.sizes().end());
  if (dense.device().is_cuda()) {
    view.device = dad::DeviceType::kCuda;
    view.device_index = dense.device().index();
  }
  return view;
}

at::Tensor Allocate(DType dtype, const dad::Shape& shape) {
  return at::detail::empty_cpu(shape, ToScalarType(dtype), /*pin_memory=*/false,
                               /*memory_format_opt=*/std::nullopt);
}

}  // namespace dad_torch
