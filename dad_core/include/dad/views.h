// Visits every view of a contribution in turn, for example to check its device.
#pragma once

#include "dad/contribution.h"

namespace dad {

// Calls visit(view, is_output) for every view with memory behind it, or that will have some.
template <typename AContribution, typename Visit>
void ForEachView(AContribution& tensor, const Visit& visit) {
  visit(tensor.input, false);
  visit(tensor.output, true);
  for (auto& layer : tensor.layers) {
    for (auto& segment : layer.rows) {
      visit(segment.a, false);
      visit(segment.d, false);
    }
    for (auto& segment : layer.indexed) {
      visit(segment.index, false);
      visit(segment.x, false);
    }
    visit(layer.dense, false);
    visit(layer.dense_bias, false);
    visit(layer.dense_square, false);
    visit(layer.dense_bias_square, false);
    visit(layer.weight, false);
    visit(layer.bias, false);
    visit(layer.output, true);
    visit(layer.output_bias, true);
  }
}

}  // namespace dad
