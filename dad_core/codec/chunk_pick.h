// One pass of chunked top-k over memory: a step's gradient is added to what waits, and the k
// largest of the chunk are found while it is in the cache.
//
//   e' = decay e + scale g
//
// The elements form groups, four for each that is wanted. At least k elements are as large as the
// k-th largest of the groups' maxima, and few more are: only these candidates are compared exactly.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "linalg/cpu_level.h"

namespace dad {

template <typename T>
struct ChunkTerms {
  const T* g = nullptr;
  T scale = 1;
  const T* e = nullptr;  // null: zeros
  T decay = 1;
  T* sum = nullptr;  // e'; may be e or g
  int64_t count = 0;
};

// Scratch memory for chunks, of one thread.
template <typename T>
class ChunkPicker {
 public:
  explicit ChunkPicker(CpuLevel level) : level_(level) {}

  // Writes e' and appends `first` + i for the min(k, non-zero) largest |e'[i]|, in rising order; of
  // equal ones those that come first. False if an e' is not finite: then nothing is appended.
  bool Pick(const ChunkTerms<T>& terms, int64_t k, uint32_t first, std::vector<uint32_t>& picked);

 private:
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  // The largest t, or one below it, for which at least k of `magnitudes` are t or more.
  Bits Limit(const std::vector<Bits>& magnitudes, int64_t k) const;
  // Those of `limit` and more, in rising order.
  void FindCandidates(const T* sum, int64_t count, Bits limit);
  // The k largest of the candidates.
  void Take(const T* sum, int64_t k, uint32_t first, std::vector<uint32_t>& picked);

  const CpuLevel level_;
  std::vector<Bits> maxima_;  // of each group: the bits of its largest magnitude
  std::vector<uint32_t> candidates_;
  std::vector<Bits> magnitudes_;  // of the candidates
};

}  // namespace dad
