// The pass over memory that the sparse methods have in common: a step's gradient is added to what
// waits, and what is worth sending is found, with r and v read once and written once.
//
//   r' = r + c g;   v' = min(v + c² s, largest finite)
//   |r'| > tau and r'² > alpha v':   r', v' go to the list, and 0, 0 into memory
//   else:                            r' and zeta v' into memory
//
// The second test is made in double, so that neither tiny nor huge gradients lose it to the range
// of a float. Every CPU level gives the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "linalg/cpu_level.h"

namespace dad {

// Elements of a chunk, in rising order, with what they had when they were found.
template <typename T>
struct Selected {
  std::vector<uint32_t> index;
  std::vector<T> r;
  std::vector<T> v;  // empty without a variance

  void Append(const Selected& more);
  void Clear();
};

template <typename T>
struct SelectRule {
  T tau = -1;        // negative: every element passes
  double alpha = 1;  // of no account without a variance
  T zeta = 1;
};

template <typename T>
struct AccumulateBlock {
  int64_t count = 0;
  const T* g = nullptr;
  const T* s = nullptr;  // null: the square of c g
  T scale = 1;           // c
  const T* r = nullptr;
  const T* v = nullptr;  // null: no variance is kept
  T* new_r = nullptr;    // may be r
  T* new_v = nullptr;
  uint32_t first = 0;  // index of the first element
  // Writes past the caches: for tensors that do not fit there.
  bool stream = false;
};

// False if an r' is not finite; what was written is then of no use.
template <typename T>
bool Accumulate(CpuLevel level, const SelectRule<T>& rule, const AccumulateBlock<T>& block,
                Selected<T>& selected);

}  // namespace dad
