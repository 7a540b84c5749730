// What one rank brings to one tensor: a dense tensor, or the factors of a layer's
// gradient, which are smaller and from which all ranks can make it.
#pragma once

#include <cstdint>
#include <vector>

#include "dad/tensor_view.h"

namespace dad {

// N rows of a layer y = x Wᵀ + b. Their part of W's gradient is Dᵀ A, and of b's the
// column sums of D. A layer that was used several times in a step has several segments.
struct RowsSegment {
  TensorView a;  // N × in: what went into the layer
  // N × out_count: the gradient at its output. Without data in a layer of a chain: it
  // follows from the layer above.
  TensorView d;
  int64_t out_begin = 0;  // which rows of W: an in-projection may use a part of them
  // The row→sample map, for methods that look at the variance over samples: this many samples
  // with N / samples adjacent rows each. 0: every row is a sample.
  int64_t samples = 0;
};

// N rows x[k] of a gradient at the rows index[k] of W: an embedding. Indices may repeat.
struct IndexedSegment {
  TensorView index;     // N, int64
  TensorView x;         // N × in
  int64_t samples = 0;  // as in RowsSegment
};

// What stands between a layer of a chain and the one above it.
enum class Activation : uint8_t {
  kNone = 0,
  kRelu,
  kLeakyRelu,
  kTanh,
  kSigmoid,
  kGelu,
  kGeluTanh,
  kSilu,
};

// One layer of a contribution by factors. The method says what its shape is and whether
// it has a bias.
struct LayerInput {
  std::vector<RowsSegment> rows;
  std::vector<IndexedSegment> indexed;
  // What the framework has added up by itself, where it has; data is null where not.
  TensorView dense;
  TensorView dense_bias;
  // Methods that look at the variance: Σ over micro-batches of the squares of their parts of
  // `dense`, in float32 or float64. Without data the dense part counts as one sample.
  TensorView dense_square;
  TensorView dense_bias_square;
  // Where the pooled gradient goes. Without data for a layer that only passes D on.
  TensorView output;
  TensorView output_bias;
  // Chains: the layer's parameters, to derive the D of the layer below.
  TensorView weight;
  TensorView bias;
  // Whether `output` and `weight` lie in memory as in × out, as Keras has its kernels; everything
  // else is as for the matrix out × in.
  bool transposed = false;
};

// One tensor of a request on this rank.
struct Contribution {
  // Factor methods: the shape is {elements of all layers}, and data is null.
  TensorView input;
  // Where the result goes when its shape is that of the input (allreduce,
  // broadcast); may be the input itself. For other kinds data is null, and the
  // request's allocator provides it.
  TensorView output;
  // alltoall: rows of the first dimension for each rank; empty means even.
  std::vector<int64_t> splits;
  // Factor methods: one layer, or the layers of a chain from the lowest to the top.
  std::vector<LayerInput> layers;
  // This rank's weight in the result, by factor methods only: ranks need not agree on it.
  double scale = 1.0;
  // What it had before it was compressed for the wire, by a cast for example, for the statistics;
  // 0: it was not.
  int64_t uncompressed_bytes = 0;
  // Asks all ranks to plan anew after this step; they learn it from the ticket.
  bool replan = false;
};

}  // namespace dad
