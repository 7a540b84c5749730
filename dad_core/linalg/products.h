// The products of matrices that exchanges need, for float and double.
//
// Every function takes the CPU level it works at, which the machine must have. The
// result is a function of the inputs and the level alone: cache sizes, alignment and
// machine do not change a bit. Ranks that repeat a computation agree on the least level
// among them and get equal results.
//
// Any size may be zero. Outputs overlap no input. One thread.
#pragma once

#include <cstdint>
#include <type_traits>

#include "linalg/cpu_level.h"
#include "linalg/matrix.h"

namespace dad {

// c = beta c + alpha dᵀ a, for d: k×m, a: k×n, c: m×n. With beta 0, c is not read.
template <typename T>
void AddOuter(CpuLevel level, std::type_identity_t<T> alpha, ConstMatrix<T> d, ConstMatrix<T> a,
              std::type_identity_t<T> beta, MatrixView<T> c);

// c = a b, for a: m×k, b: k×n.
template <typename T>
void Multiply(CpuLevel level, ConstMatrix<T> a, ConstMatrix<T> b, MatrixView<T> c);

// c = a bᵀ, for a: m×k, b: n×k.
template <typename T>
void MultiplyTransposed(CpuLevel level, ConstMatrix<T> a, ConstMatrix<T> b, MatrixView<T> c);

// c = beta c + alpha Σ_k ut[k]ᵀ vt[k]. Factors are stored with one direction per row:
// ut is k×m, vt is k×n. With `c_bias` (m elements) vt has one more column, that of the
// bias, which goes there: c_bias = beta c_bias + alpha Σ_k ut[k] vt[k][n].
template <typename T>
void ExpandFactors(CpuLevel level, std::type_identity_t<T> alpha, ConstMatrix<T> ut,
                   ConstMatrix<T> vt, std::type_identity_t<T> beta, MatrixView<T> c,
                   std::type_identity_t<T>* c_bias);

// The bias gradient: out[j] = beta out[j] + alpha Σ_k d[k][j], for d: k×m.
template <typename T>
void ColumnSums(CpuLevel level, std::type_identity_t<T> alpha, ConstMatrix<T> d,
                std::type_identity_t<T> beta, T* out);

// c = xᵀ.
template <typename T>
void Transpose(ConstMatrix<T> x, MatrixView<T> c);

// Whether there is neither infinity nor NaN.
template <typename T>
bool AllFinite(MatrixView<T> x);

}  // namespace dad
