// G and Σ g² of a layer that comes in rows, for the sparse methods on a device: G = Dᵀ A and
// Σ g² = (D∘D)ᵀ(A∘A), by cuBLAS.
#pragma once

#include "dad/contribution.h"
#include "dad/method.h"
#include "exchange/device/sparse_coder.h"

namespace dad {

// Adds the layer's rows to what came formed: tensor.g and, with a variance, tensor.s become memory
// of the arena that holds both, and the tensor's scale 1. `weight`: the tensor is the layer's
// weight, else its bias, which is like a column of ones in A.
template <typename T>
Status AddRowMoments(DeviceBench& bench, const LayerInput& layer, const LayerShape& shape,
                     bool weight, SparseTensor<T>& tensor, DeviceArena& arena);

}  // namespace dad
