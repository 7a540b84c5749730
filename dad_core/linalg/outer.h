// A sum of outer products in the form that Kernels::outer takes. Internal to linalg/.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "linalg/kernels.h"
#include "linalg/matrix.h"
#include "util/aligned_buffer.h"

namespace dad::linalg {

// Σ over terms of scale dᵀ a (m×n), packed: added to any rows of a matrix, and as often as
// needed.
template <typename T>
class PackedOuter {
 public:
  struct Term {
    MatrixView<const T> d;  // k×(at most m)
    MatrixView<const T> a;  // k×n; more columns are not looked at
    T scale = 1;
    int64_t out_begin = 0;  // the row of the result that d's first column belongs to
  };

  PackedOuter(const Kernels<T>& kernels, const std::vector<Term>& terms, int64_t m, int64_t n);

  int64_t depth() const { return depth_; }

  // c = beta c + rows [row_begin, row_begin + c.rows) of the sum; row_begin is a multiple of
  // tile_rows. With beta 0, c is not read.
  void AddTo(int64_t row_begin, T beta, MatrixView<T> c) const;

 private:
  // Panels of so many rows of d and a stay in the first-level cache.
  static constexpr int64_t kChunk = 128;

  const Kernels<T>& kernels_;
  int64_t depth_ = 0;
  int64_t padded_m_ = 0;
  int64_t padded_n_ = 0;
  AlignedBuffer d_;
  AlignedBuffer a_;
};

// Rows of a matrix with n columns that stay in the second-level cache while several things
// are done to them; a multiple of tile_rows. Few long rows are better than many: they are
// the streams that the hardware has to foresee.
template <typename T>
int64_t BlockRows(const Kernels<T>& kernels, int64_t n) {
  constexpr int64_t kBlockBytes = 64 << 10;
  constexpr int64_t kMaxTiles = 16;
  const int64_t row_bytes = std::max<int64_t>(1, n) * static_cast<int64_t>(sizeof(T));
  const int64_t tiles = kBlockBytes / row_bytes / kernels.tile_rows;
  return std::clamp<int64_t>(tiles, 1, kMaxTiles) * kernels.tile_rows;
}

}  // namespace dad::linalg
