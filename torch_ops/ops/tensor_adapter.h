// at::Tensor <-> dad::TensorView.
#pragma once

#include <ATen/core/Tensor.h>

#include "dad/status.h"
#include "dad/tensor_view.h"

namespace dad_torch {

dad::Result<dad::DType> ToDType(at::ScalarType type);
at::ScalarType ToScalarType(dad::DType dtype);

// A dense tensor with the elements of `tensor` in row-major order, on the device where it is:
// `tensor` itself where it is one already, else a copy.
dad::Result<at::Tensor> Dense(const at::Tensor& tensor);

// The view of a tensor that Dense() gave.
dad::TensorView ViewOf(const at::Tensor& dense);

// Uninitialised memory on the host. Safe on the worker thread: needs neither the GIL nor
// torch's thread pool.
at::Tensor Allocate(dad::DType dtype, const dad::Shape& shape);

}  // namespace dad_torch
