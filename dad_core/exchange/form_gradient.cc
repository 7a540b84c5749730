#include "exchange/form_gradient.h"

#include <vector>

#include "exchange/share_io.h"
#include "linalg/products.h"

namespace dad {
namespace {

template <typename T>
std::vector<T> Wide(const TensorView& values) {
  std::vector<T> wide(static_cast<size_t>(values.num_elements()));
  ConvertTo(values, wide.data());
  return wide;
}

template <typename T>
void Form(const LayerShape& shape, const LayerInput& layer, const TensorView& weight_out,
          const TensorView& bias_out) {
  std::vector<T> weight(static_cast<size_t>(shape.out * shape.in));
  std::vector<T> bias(static_cast<size_t>(shape.bias ? shape.out : 0));
  if (layer.dense.data != nullptr) ConvertTo(layer.dense, weight.data());
  if (shape.bias && layer.dense_bias.data != nullptr) ConvertTo(layer.dense_bias, bias.data());
  const MatrixView<T> gradient = ViewOf(weight.data(), shape.out, shape.in);
  const CpuLevel level = BestCpuLevel();
  for (const RowsSegment& segment : layer.rows) {
    const std::vector<T> a = Wide<T>(segment.a);
    const std::vector<T> d = Wide<T>(segment.d);
    const int64_t rows = segment.a.shape[0];
    const int64_t count = segment.d.shape[1];
    const int64_t begin = count == shape.out ? 0 : segment.out_begin;
    const MatrixView<const T> deltas = ViewOf(d.data(), rows, count);
    AddOuter<T>(level, T(1), deltas, ViewOf(a.data(), rows, shape.in), T(1),
                gradient.Rows(begin, count));
    if (shape.bias) ColumnSums<T>(level, T(1), deltas, T(1), bias.data() + begin);
  }
  for (const IndexedSegment& segment : layer.indexed) {
    const std::vector<T> x = Wide<T>(segment.x);
    const auto* index = static_cast<const int64_t*>(segment.index.data);
    for (int64_t k = 0; k < segment.index.num_elements(); ++k) {
      T* row = gradient.row(index[k]);
      for (int64_t j = 0; j < shape.in; ++j) row[j] += x[static_cast<size_t>(k * shape.in + j)];
    }
  }
  ConvertFrom(weight.data(), weight_out);
  if (shape.bias) ConvertFrom(bias.data(), bias_out);
}

}  // namespace

void FormGradient(const LayerShape& shape, const LayerInput& layer, const TensorView& weight,
                  const TensorView& bias) {
  if (weight.dtype == DType::kFloat64) {
    Form<double>(shape, layer, weight, bias);
  } else {
    Form<float>(shape, layer, weight, bias);
  }
}

}  // namespace dad
