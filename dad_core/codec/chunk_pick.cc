#include "codec/chunk_pick.h"

#include <algorithm>
#include <bit>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The loops below are worth vectorising at any -O level of the build.
#pragma GCC optimize("O3")

namespace dad {
namespace {

// Groups for each element that is wanted. More groups leave fewer candidates, but more maxima.
constexpr int64_t kGroupsPerPick = 4;
constexpr int64_t kGroupMultiple = 64;  // whole vectors at every CPU level

// Bits are those of a magnitude, which are ordered as the magnitudes are. Signed, since that is
// what the oldest vector instructions compare.
template <typename T>
using Magnitude = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <typename T>
inline Magnitude<T> MagnitudeOf(T x) {
  return std::bit_cast<Magnitude<T>>(x) & std::numeric_limits<Magnitude<T>>::max();
}

// Group j has the elements j, j + groups, j + 2 groups, ...: neighbours are in different groups, so
// a maximum needs no reduction inside a vector.
template <typename T, bool kAddsE>
[[gnu::always_inline]] inline void AddAndFindMaxima(const ChunkTerms<T>& terms, int64_t groups,
                                                    Magnitude<T>* maxima) {
  std::fill_n(maxima, groups, Magnitude<T>(0));
  for (int64_t begin = 0; begin < terms.count; begin += groups) {
    const int64_t n = std::min(groups, terms.count - begin);
    const T* const g = terms.g + begin;
    const T* const e = kAddsE ? terms.e + begin : nullptr;
    T* const sum = terms.sum + begin;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
      T x = terms.scale * g[j];
      if constexpr (kAddsE) x += terms.decay * e[j];
      sum[j] = x;
      const Magnitude<T> magnitude = MagnitudeOf(x);
      maxima[j] = magnitude > maxima[j] ? magnitude : maxima[j];
    }
  }
}

template <typename T>
void AddBaseline(const ChunkTerms<T>& terms, int64_t groups, Magnitude<T>* maxima) {
  terms.e == nullptr ? AddAndFindMaxima<T, false>(terms, groups, maxima)
                     : AddAndFindMaxima<T, true>(terms, groups, maxima);
}

template <typename T>
[[gnu::always_inline]] inline int64_t CountFrom(const Magnitude<T>* values, int64_t count,
                                                Magnitude<T> limit) {
  Magnitude<T> found = 0;
  for (int64_t i = 0; i < count; ++i) found += values[i] >= limit ? 1 : 0;
  return found;
}

// Bit by bit from the top; ends early where exactly k are found.
template <typename T>
[[gnu::always_inline]] inline Magnitude<T> FindLimit(const Magnitude<T>* maxima, int64_t groups,
                                                     int64_t k) {
  Magnitude<T> limit = 0;
  for (int bit = std::numeric_limits<Magnitude<T>>::digits - 1; bit >= 0; --bit) {
    const Magnitude<T> higher = limit | Magnitude<T>(1) << bit;
    const int64_t found = CountFrom<T>(maxima, groups, higher);
    if (found < k) continue;
    limit = higher;
    if (found == k) break;
  }
  return limit;
}

#if defined(__x86_64__)
template <typename T>
[[gnu::target("avx2")]] void AddAvx2(const ChunkTerms<T>& terms, int64_t groups,
                                     Magnitude<T>* maxima) {
  terms.e == nullptr ? AddAndFindMaxima<T, false>(terms, groups, maxima)
                     : AddAndFindMaxima<T, true>(terms, groups, maxima);
}
template <typename T>
[[gnu::target("avx2")]] Magnitude<T> LimitAvx2(const Magnitude<T>* maxima, int64_t groups,
                                               int64_t k) {
  return FindLimit<T>(maxima, groups, k);
}

// Writes the indices of magnitudes of `limit` and more; the number of them. `count` is a multiple
// of 8, and `out` has room for all.
[[gnu::target("avx2,bmi")]] size_t FindFromAvx2(const float* values, int64_t count, int32_t limit,
                                                uint32_t* out) {
  const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
  const __m256i below = _mm256_set1_epi32(limit - 1);
  size_t found = 0;
  for (int64_t begin = 0; begin < count; begin += 64) {
    const int64_t end = std::min<int64_t>(count, begin + 64);
    uint64_t passes = 0;
    for (int64_t i = begin; i < end; i += 8) {
      const __m256i magnitude = _mm256_and_si256(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i)), no_sign);
      const auto mask = static_cast<unsigned>(
          _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(magnitude, below))));
      passes |= uint64_t{mask} << (i - begin);
    }
    for (; passes != 0; passes &= passes - 1) {
      out[found++] = static_cast<uint32_t>(begin + std::countr_zero(passes));
    }
  }
  return found;
}
#endif

}  // namespace

template <typename T>
typename ChunkPicker<T>::Bits ChunkPicker<T>::Limit(const std::vector<Bits>& magnitudes,
                                                    int64_t k) const {
  const auto* from = reinterpret_cast<const Magnitude<T>*>(magnitudes.data());
  const auto count = static_cast<int64_t>(magnitudes.size());
#if defined(__x86_64__)
  if (level_ >= CpuLevel::kAvx2) return static_cast<Bits>(LimitAvx2<T>(from, count, k));
#endif
  return static_cast<Bits>(FindLimit<T>(from, count, k));
}

template <typename T>
void ChunkPicker<T>::FindCandidates(const T* sum, int64_t count, Bits limit) {
  candidates_.resize(static_cast<size_t>(count));
  size_t found = 0;
  int64_t begin = 0;
#if defined(__x86_64__)
  if constexpr (sizeof(T) == sizeof(float)) {
    if (level_ >= CpuLevel::kAvx2) {
      begin = count / 8 * 8;
      found = FindFromAvx2(sum, begin, static_cast<int32_t>(limit), candidates_.data());
    }
  }
#endif
  for (int64_t i = begin; i < count; ++i) {
    candidates_[found] = static_cast<uint32_t>(i);
    found += static_cast<Bits>(MagnitudeOf(sum[i])) >= limit ? 1 : 0;
  }
  candidates_.resize(found);
}

template <typename T>
void ChunkPicker<T>::Take(const T* sum, int64_t k, uint32_t first, std::vector<uint32_t>& picked) {
  const size_t begin = picked.size();
  if (static_cast<int64_t>(candidates_.size()) <= k) {
    picked.insert(picked.end(), candidates_.begin(), candidates_.end());
    for (size_t i = begin; i < picked.size(); ++i) picked[i] += first;
    return;
  }
  magnitudes_.resize(candidates_.size());
  for (size_t i = 0; i < candidates_.size(); ++i) {
    magnitudes_[i] = static_cast<Bits>(MagnitudeOf(sum[candidates_[i]]));
  }
  // What is larger than the limit is taken, and as many of its equals as there is room for.
  const Bits limit = Limit(magnitudes_, k);
  int64_t equal = k;
  for (const Bits magnitude : magnitudes_) equal -= magnitude > limit ? 1 : 0;
  picked.resize(begin + magnitudes_.size());
  size_t end = begin;
  for (size_t i = 0; i < magnitudes_.size(); ++i) {
    picked[end] = first + candidates_[i];
    const bool is_equal = magnitudes_[i] == limit;
    end += magnitudes_[i] > limit || (is_equal && equal > 0) ? 1 : 0;
    equal -= is_equal ? 1 : 0;
  }
  picked.resize(end);
}

template <typename T>
bool ChunkPicker<T>::Pick(const ChunkTerms<T>& terms, int64_t k, uint32_t first,
                          std::vector<uint32_t>& picked) {
  if (terms.count == 0) return true;
  const int64_t wanted = kGroupsPerPick * std::max<int64_t>(k, 1);
  const int64_t groups =
      std::min(terms.count, (wanted + kGroupMultiple - 1) / kGroupMultiple * kGroupMultiple);
  maxima_.resize(static_cast<size_t>(groups));
  auto* const maxima = reinterpret_cast<Magnitude<T>*>(maxima_.data());
#if defined(__x86_64__)
  if (level_ >= CpuLevel::kAvx2) {
    AddAvx2(terms, groups, maxima);
  } else {
    AddBaseline(terms, groups, maxima);
  }
#else
  AddBaseline(terms, groups, maxima);
#endif
  const Bits infinite = std::bit_cast<Bits>(std::numeric_limits<T>::infinity());
  if (*std::max_element(maxima_.begin(), maxima_.end()) >= infinite) return false;
  if (k <= 0) return true;
  // Zeros are never taken.
  FindCandidates(terms.sum, terms.count, std::max(Limit(maxima_, k), Bits(1)));
  Take(terms.sum, k, first, picked);
  return true;
}

template class ChunkPicker<float>;
template class ChunkPicker<double>;

}  // namespace dad
