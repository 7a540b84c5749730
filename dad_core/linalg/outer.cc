#include "linalg/outer.h"

namespace dad::linalg {
namespace {

int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

template <typename T>
AlignedBuffer Room(int64_t count) {
  return AlignedBuffer(static_cast<size_t>(count) * sizeof(T));
}

}  // namespace

template <typename T>
PackedOuter<T>::PackedOuter(const Kernels<T>& kernels, const std::vector<Term>& terms, int64_t m,
                            int64_t n)
    : kernels_(kernels),
      padded_m_(RoundUp(m, kernels.tile_rows)),
      padded_n_(RoundUp(n, kernels.tile_cols)) {
  for (const Term& term : terms) depth_ += term.d.rows;
  d_ = Room<T>(depth_ * padded_m_);
  a_ = Room<T>(depth_ * padded_n_);
  auto* d_out = reinterpret_cast<T*>(d_.data());
  auto* a_out = reinterpret_cast<T*>(a_.data());
  int64_t at = 0;  // in the whole depth
  for (const Term& term : terms) {
    for (int64_t k = 0; k < term.d.rows;) {
      const int64_t chunk_begin = at / kChunk * kChunk;
      const int64_t chunk_depth = std::min(kChunk, depth_ - chunk_begin);
      const int64_t rows = std::min(term.d.rows - k, chunk_begin + chunk_depth - at);
      kernels.pack(term.d.row(k), rows, term.d.cols, term.d.stride, term.scale, term.out_begin, m,
                   kernels.tile_rows, chunk_depth, at - chunk_begin,
                   d_out + chunk_begin * padded_m_);
      kernels.pack(term.a.row(k), rows, n, term.a.stride, T{1}, 0, n, kernels.tile_cols,
                   chunk_depth, at - chunk_begin, a_out + chunk_begin * padded_n_);
      k += rows;
      at += rows;
    }
  }
}

template <typename T>
void PackedOuter<T>::AddTo(int64_t row_begin, T beta, MatrixView<T> c) const {
  const auto* d = reinterpret_cast<const T*>(d_.data());
  const auto* a = reinterpret_cast<const T*>(a_.data());
  int64_t chunk = 0;
  do {  // once even if there is no term: beta counts
    const int64_t chunk_depth = std::min(kChunk, depth_ - chunk);
    kernels_.outer(chunk_depth, d + chunk * padded_m_ + row_begin * chunk_depth,
                   a + chunk * padded_n_, chunk == 0 ? beta : T{1}, c.data, c.rows, c.cols,
                   c.stride);
    chunk += kChunk;
  } while (chunk < depth_);
}

template class PackedOuter<float>;
template class PackedOuter<double>;

}  // namespace dad::linalg
