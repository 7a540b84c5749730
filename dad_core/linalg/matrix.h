// A row-major matrix in somebody else's memory.
#pragma once

#include <cstdint>
#include <type_traits>

namespace dad {

template <typename T>
struct MatrixView {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements from one row to the next; at least cols

  T* row(int64_t i) const { return data + i * stride; }
  bool empty() const { return rows == 0 || cols == 0; }
  bool contiguous() const { return stride == cols || rows <= 1; }

  // Rows [begin, begin + count), columns [begin, begin + count).
  MatrixView Rows(int64_t begin, int64_t count) const {
    return {data + begin * stride, count, cols, stride};
  }
  MatrixView Cols(int64_t begin, int64_t count) const {
    return {data + begin, rows, count, stride};
  }

  operator MatrixView<const T>() const  // NOLINT: implicit, as for pointers
      requires(!std::is_const_v<T>) {
    return {data, rows, cols, stride};
  }
};

// Rows that follow each other without gaps.
template <typename T>
MatrixView<T> ViewOf(T* data, int64_t rows, int64_t cols) {
  return {data, rows, cols, cols};
}

// An argument that takes part in no deduction, so that a MatrixView<T> converts to it.
template <typename T>
using ConstMatrix = std::type_identity_t<MatrixView<const T>>;

}  // namespace dad
