#include "exchange/layer/layer_result.h"

#include "exchange/by_method.h"
#include "exchange/share/share_io.h"
#include "linalg/products.h"

namespace dad {
namespace {

template <typename T>
T* AtLeast(AlignedBuffer& buffer, int64_t count) {
  const size_t num_bytes = static_cast<size_t>(count) * sizeof(T);
  if (buffer.size() < num_bytes) buffer = AlignedBuffer(num_bytes);
  return reinterpret_cast<T*>(buffer.data());
}

}  // namespace

template <typename T>
T* LayerResult<T>::Take(const TensorView& output, int64_t count, bool in_order) {
  output_ = output;
  in_order_ = in_order;
  const bool direct = in_order && output.dtype == DTypeOf<T>();
  values_ = direct ? static_cast<T*>(output.data) : AtLeast<T>(formed_, count);
  return values_;
}

template <typename T>
void LayerResult<T>::Deliver(int64_t rows, int64_t cols) {
  const bool same = output_.dtype == DTypeOf<T>();
  if (!in_order_) {
    T* turned = same ? static_cast<T*>(output_.data) : AtLeast<T>(turned_, rows * cols);
    Transpose<T>(ViewOf(values_, rows, cols), ViewOf(turned, cols, rows));
    values_ = turned;
  }
  if (!same) ConvertFrom(values_, output_);
}

template class LayerResult<float>;
template class LayerResult<double>;

}  // namespace dad
