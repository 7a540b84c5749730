// The share of an exchange by factors (exchange/method/factor/factor.h, wire_format.md): what a
// rank sends of its layers, and what is found in those of the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dad/contribution.h"
#include "dad/method.h"
#include "dad/status.h"
#include "exchange/exchange.h"
#include "exchange/share/share_io.h"

namespace dad {

// Values that came in a share, or our own where they lie.
struct FactorValues {
  BlockView block;
  const TensorView* own = nullptr;
};

struct RowsPiece {
  int rank = 0;
  int ordinal = 0;  // among the rank's pieces of the layer
  int64_t rows = 0;
  int64_t out_begin = 0;
  int64_t out_count = 0;
  double scale = 1.0;
  bool has_d = false;
  FactorValues a;
  FactorValues d;
  ByteSpan bits;          // of a layer that only passes D on
  int64_t row_begin = 0;  // in the stack of its group
};

struct IndexedPiece {
  int rank = 0;
  int64_t rows = 0;
  double scale = 1.0;
  ByteSpan index;  // uint32
  const TensorView* own_index = nullptr;
  FactorValues x;
};

struct DensePiece {
  int rank = 0;
  double scale = 1.0;
  FactorValues weight;
  FactorValues bias;  // only with a bias
};

// Everybody's part in one layer, in rank order.
struct LayerPieces {
  std::vector<RowsPiece> rows;
  std::vector<IndexedPiece> indexed;
  std::vector<DensePiece> dense;
};

// Rows of W that pieces speak of: all of them, mostly.
struct RowsBlock {
  int64_t out_begin;
  int64_t out_count;
  std::vector<RowsPiece*> pieces;
  int64_t rows = 0;
};
// The blocks of a layer, in the order in which they come; gives the pieces their row_begin.
std::vector<RowsBlock> BlocksOf(LayerPieces& pieces);

// `own`: this rank's layers as they travel, on the host; what is large is referenced. T is the type
// that the exchange computes in.
template <typename T>
void WriteFactorShare(const std::vector<LayerShape>& layers, const std::vector<LayerInput>& own,
                      double scale, bool replan, ShareWriter& out);

// Appends to `pieces`, one for each layer, what refers to `own`, or to `share`; InvalidArgument if
// that is malformed. `replan` is set if its sender wants one.
void AddOwnPieces(const std::vector<LayerShape>& layers, const std::vector<LayerInput>& own,
                  int rank, double scale, std::vector<LayerPieces>& pieces);
Status ParseFactorShare(const TensorSpec& spec, const std::vector<LayerShape>& layers, int rank,
                        ByteSpan share, std::vector<LayerPieces>& pieces, bool& replan);

// A bit for each element: whether it is positive.
template <typename T>
std::vector<std::byte> PositiveBits(const TensorView& a);

}  // namespace dad
