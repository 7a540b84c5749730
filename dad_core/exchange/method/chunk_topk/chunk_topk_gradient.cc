#include "exchange/method/chunk_topk/chunk_topk_gradient.h"

#include <algorithm>

#include "exchange/by_method.h"
#include "exchange/layer/form_gradient.h"
#include "exchange/share/share_io.h"

namespace dad {
namespace {

template <typename T>
GradientValues<T> LookedUpRows(const LayerShape& shape, const LayerInput& layer) {
  std::vector<int64_t> rows;
  for (const IndexedSegment& segment : layer.indexed) {
    const auto* index = static_cast<const int64_t*>(segment.index.data);
    rows.insert(rows.end(), index, index + segment.index.num_elements());
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());

  GradientValues<T> gradient{Places(shape.out * shape.in, shape.in, std::move(rows))};
  gradient.formed.assign(static_cast<size_t>(gradient.places.size()), T(0));
  for (const IndexedSegment& segment : layer.indexed) {
    const auto* index = static_cast<const int64_t*>(segment.index.data);
    std::vector<T> x(static_cast<size_t>(segment.x.num_elements()));
    ConvertTo(segment.x, x.data());
    for (int64_t n = 0; n < segment.index.num_elements(); ++n) {
      T* const to = gradient.formed.data() + gradient.places.From(index[n] * shape.in);
      const T* const from = x.data() + n * shape.in;
      for (int64_t j = 0; j < shape.in; ++j) to[j] += from[j];
    }
  }
  gradient.values = gradient.formed.data();
  return gradient;
}

}  // namespace

template <typename T>
GradientValues<T> TensorGradient(const TensorView& tensor) {
  GradientValues<T> gradient{Places(tensor.num_elements())};
  if (tensor.dtype == DTypeOf<T>()) {
    gradient.values = static_cast<const T*>(tensor.data);
  } else {
    gradient.formed.resize(static_cast<size_t>(tensor.num_elements()));
    ConvertTo(tensor, gradient.formed.data());
    gradient.values = gradient.formed.data();
  }
  return gradient;
}

template <typename T>
GradientValues<T> LayerGradient(const LayerShape& shape, const LayerInput& layer) {
  const bool has_dense = layer.dense.data != nullptr;
  if (layer.rows.empty() && !has_dense) return LookedUpRows<T>(shape, layer);
  if (layer.rows.empty() && layer.indexed.empty()) return TensorGradient<T>(layer.dense);
  GradientValues<T> gradient{Places(shape.out * shape.in)};
  gradient.formed.resize(static_cast<size_t>(shape.out * shape.in));
  FormedLayer formed;
  formed.weight.data = gradient.formed.data();
  formed.weight.dtype = DTypeOf<T>();
  formed.weight.shape = {shape.out, shape.in};
  FormGradient(shape, layer, 1.0, false, formed);
  gradient.values = gradient.formed.data();
  return gradient;
}

template <typename T>
void CopyRows(const Places& places, const T* tensor, T* rows) {
  for (const int64_t row : places.rows()) {
    rows = std::copy_n(tensor + row * places.columns(), places.columns(), rows);
  }
}

template <typename T>
void PutRows(const Places& places, const T* rows, T* tensor) {
  for (const int64_t row : places.rows()) {
    std::copy_n(rows, places.columns(), tensor + row * places.columns());
    rows += places.columns();
  }
}

#define DAD_INSTANTIATE(T)                                                           \
  template GradientValues<T> TensorGradient<T>(const TensorView&);                   \
  template GradientValues<T> LayerGradient<T>(const LayerShape&, const LayerInput&); \
  template void CopyRows<T>(const Places&, const T*, T*);                            \
  template void PutRows<T>(const Places&, const T*, T*)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
