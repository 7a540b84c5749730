// Memory in which an exchange forms the gradient of a layer, or of its bias: the output itself
// where that has the type and the order of the exchange, else memory of its own, which is
// converted and transposed into the output at the end.
#pragma once

#include <cstdint>

#include "dad/tensor_view.h"
#include "util/aligned_buffer.h"

namespace dad {

template <typename T>
class LayerResult {
 public:
  // Not initialised. `in_order`: what is formed has the order of the output.
  T* Take(const TensorView& output, int64_t count, bool in_order = true);
  T* values() { return values_; }
  // Once what was taken is filled; rows × cols if it is not in order.
  void Deliver(int64_t rows, int64_t cols);
  void Deliver() { Deliver(1, output_.num_elements()); }
  // Gives memory back that would be kept for the next step.
  void Release() { *this = {}; }

 private:
  TensorView output_;
  bool in_order_ = true;
  T* values_ = nullptr;
  AlignedBuffer formed_;
  AlignedBuffer turned_;
};

}  // namespace dad
