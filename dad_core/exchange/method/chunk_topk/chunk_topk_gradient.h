// The gradient that chunked top-k picks from: a tensor, or the rows of an embedding that were
// looked up in a step.
#pragma once

#include <vector>

#include "dad/contribution.h"
#include "dad/method.h"
#include "exchange/method/chunk_topk/chunk_topk_work.h"

namespace dad {

template <typename T>
struct GradientValues {
  Places places{0};
  const T* values = nullptr;
  std::vector<T> formed = {};  // what values point to, where they are not the contribution's own
};

template <typename T>
GradientValues<T> TensorGradient(const TensorView& tensor);

// The gradient of a layer without a bias.
template <typename T>
GradientValues<T> LayerGradient(const LayerShape& shape, const LayerInput& layer);

// Between a whole tensor and its rows at `places`.
template <typename T>
void CopyRows(const Places& places, const T* tensor, T* rows);
template <typename T>
void PutRows(const Places& places, const T* rows, T* tensor);

}  // namespace dad
