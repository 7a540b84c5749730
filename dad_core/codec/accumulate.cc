#include "codec/accumulate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dad {
namespace {

// Selected elements gather here before they go to the list.
constexpr int64_t kGather = 1024;

template <typename T>
struct Gathered {
  static constexpr int64_t kSlack = 8;  // a vector may be stored of which only some lanes count
  uint32_t index[kGather + kSlack];
  T r[kGather + kSlack];
  T v[kGather + kSlack];
  int64_t count = 0;

  void Add(uint32_t i, T r_value, T v_value) {
    index[count] = i;
    r[count] = r_value;
    v[count] = v_value;
    ++count;
  }
  void MoveTo(Selected<T>& selected, bool with_variance) {
    selected.index.insert(selected.index.end(), index, index + count);
    selected.r.insert(selected.r.end(), r, r + count);
    if (with_variance) selected.v.insert(selected.v.end(), v, v + count);
    count = 0;
  }
};

// Elements [begin, end) of the block, at most kGather of them.
template <typename T>
bool AccumulateScalar(const SelectRule<T>& rule, const AccumulateBlock<T>& b, int64_t begin,
                      int64_t end, Gathered<T>& out) {
  const bool with_variance = b.v != nullptr;
  const T scale_squared = b.scale * b.scale;
  T poison = 0;
  for (int64_t i = begin; i < end; ++i) {
    const T x = b.g[i] * b.scale;
    const T r = b.r[i] + x;
    poison += r - r;
    bool passes = std::fabs(r) > rule.tau;
    T v = 0;
    if (with_variance) {
      v = b.v[i] + (b.s != nullptr ? b.s[i] * scale_squared : x * x);
      v = v < std::numeric_limits<T>::max() ? v : std::numeric_limits<T>::max();
      const auto wide = static_cast<double>(r);
      passes = passes && wide * wide > rule.alpha * static_cast<double>(v);
    }
    if (passes) out.Add(b.first + static_cast<uint32_t>(i), r, v);
    b.new_r[i] = passes ? T(0) : r;
    if (with_variance) b.new_v[i] = passes ? T(0) : v * rule.zeta;
  }
  return poison == T(0);
}

#if defined(__x86_64__)
// For each mask of 8 lanes: the numbers of those that are set, at the front.
struct FrontTable {
  alignas(32) int32_t lanes[256][8];
};
constexpr FrontTable MakeFrontTable() {
  FrontTable table{};
  for (int mask = 0; mask < 256; ++mask) {
    int at = 0;
    for (int lane = 0; lane < 8; ++lane) {
      if ((mask >> lane & 1) != 0) table.lanes[mask][at++] = lane;
    }
  }
  return table;
}
constexpr FrontTable kFront = MakeFrontTable();

// Whole vectors of [begin, end); returns where it stopped. `poison` gets a bit set for what is not
// finite.
template <bool kVariance, bool kSquares, bool kStream>
[[gnu::target("avx2,popcnt")]] int64_t AccumulateAvx2(const SelectRule<float>& rule,
                                                      const AccumulateBlock<float>& b,
                                                      int64_t begin, int64_t end,
                                                      Gathered<float>& out, int& poison) {
  const __m256 scale = _mm256_set1_ps(b.scale);
  const __m256 scale_squared = _mm256_set1_ps(b.scale * b.scale);
  const __m256 largest = _mm256_set1_ps(std::numeric_limits<float>::max());
  const __m256 tau = _mm256_set1_ps(rule.tau);
  const __m256 zeta = _mm256_set1_ps(rule.zeta);
  const __m256d alpha = _mm256_set1_pd(rule.alpha);
  const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const __m256i lane_bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256 strange = _mm256_setzero_ps();
  int64_t i = begin;
  for (; i + 8 <= end; i += 8) {
    const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(b.g + i), scale);
    __m256 r = _mm256_add_ps(_mm256_loadu_ps(b.r + i), x);
    const __m256 nothing = _mm256_sub_ps(r, r);
    strange = _mm256_or_ps(strange, _mm256_cmp_ps(nothing, nothing, _CMP_UNORD_Q));
    int mask = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_and_ps(r, no_sign), tau, _CMP_GT_OQ));
    __m256 v = _mm256_setzero_ps();
    __m256 kept = v;
    if constexpr (kVariance) {
      const __m256 more =
          kSquares ? _mm256_mul_ps(_mm256_loadu_ps(b.s + i), scale_squared) : _mm256_mul_ps(x, x);
      v = _mm256_min_ps(_mm256_add_ps(_mm256_loadu_ps(b.v + i), more), largest);
      const __m256d r_low = _mm256_cvtps_pd(_mm256_castps256_ps128(r));
      const __m256d r_high = _mm256_cvtps_pd(_mm256_extractf128_ps(r, 1));
      const __m256d v_low = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
      const __m256d v_high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
      const int low = _mm256_movemask_pd(
          _mm256_cmp_pd(_mm256_mul_pd(r_low, r_low), _mm256_mul_pd(alpha, v_low), _CMP_GT_OQ));
      const int high = _mm256_movemask_pd(
          _mm256_cmp_pd(_mm256_mul_pd(r_high, r_high), _mm256_mul_pd(alpha, v_high), _CMP_GT_OQ));
      mask &= low | (high << 4);
      kept = _mm256_mul_ps(v, zeta);
    }
    // What is selected moves to the front of a vector that is stored whole. No branch: at a few per
    // cent it would be foreseen wrongly more often than this costs.
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kFront.lanes[mask]));
    const __m256i place = _mm256_add_epi32(
        _mm256_set1_epi32(static_cast<int>(b.first + static_cast<uint32_t>(i))), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.index + out.count), place);
    _mm256_storeu_ps(out.r + out.count, _mm256_permutevar8x32_ps(r, order));
    if constexpr (kVariance) {
      _mm256_storeu_ps(out.v + out.count, _mm256_permutevar8x32_ps(v, order));
    }
    out.count += __builtin_popcount(static_cast<unsigned>(mask));
    const __m256i gone =
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), lane_bits), lane_bits);
    r = _mm256_andnot_ps(_mm256_castsi256_ps(gone), r);
    kept = _mm256_andnot_ps(_mm256_castsi256_ps(gone), kept);
    if constexpr (kStream) {
      _mm256_stream_ps(b.new_r + i, r);
      if constexpr (kVariance) _mm256_stream_ps(b.new_v + i, kept);
    } else {
      _mm256_storeu_ps(b.new_r + i, r);
      if constexpr (kVariance) _mm256_storeu_ps(b.new_v + i, kept);
    }
  }
  poison |= _mm256_movemask_ps(strange);
  return i;
}

using Avx2Loop = int64_t (*)(const SelectRule<float>&, const AccumulateBlock<float>&, int64_t,
                             int64_t, Gathered<float>&, int&);

template <bool kStream>
Avx2Loop ChooseLoop(const AccumulateBlock<float>& b) {
  if (b.v == nullptr) return AccumulateAvx2<false, false, kStream>;
  return b.s != nullptr ? AccumulateAvx2<true, true, kStream>
                        : AccumulateAvx2<true, false, kStream>;
}

// Elements up to the first at which both outputs can be streamed to; -1 if there is none.
int64_t UntilAligned(const AccumulateBlock<float>& b) {
  constexpr uintptr_t kVector = 32;
  const uintptr_t off = reinterpret_cast<uintptr_t>(b.new_r) % kVector;
  if (b.v != nullptr && reinterpret_cast<uintptr_t>(b.new_v) % kVector != off) return -1;
  return static_cast<int64_t>((kVector - off) % kVector / sizeof(float));
}

bool AccumulateWithAvx2(const SelectRule<float>& rule, const AccumulateBlock<float>& b,
                        Selected<float>& selected) {
  Gathered<float> out;
  int64_t begin = 0;
  bool finite = true;
  bool stream = b.stream;
  if (stream) {
    const int64_t head = UntilAligned(b);
    stream = head >= 0;
    if (head > 0) {
      begin = std::min(head, b.count);
      finite = AccumulateScalar(rule, b, 0, begin, out);
      out.MoveTo(selected, b.v != nullptr);
    }
  }
  const Avx2Loop loop = stream ? ChooseLoop<true>(b) : ChooseLoop<false>(b);
  int poison = 0;
  while (begin < b.count) {
    const int64_t end = std::min(begin + kGather, b.count);
    const int64_t done = loop(rule, b, begin, end, out, poison);
    if (done < end) finite = AccumulateScalar(rule, b, done, end, out) && finite;
    out.MoveTo(selected, b.v != nullptr);
    begin = end;
  }
  if (stream) _mm_sfence();
  return finite && poison == 0;
}
#endif

}  // namespace

template <typename T>
void Selected<T>::Append(const Selected& more) {
  index.insert(index.end(), more.index.begin(), more.index.end());
  r.insert(r.end(), more.r.begin(), more.r.end());
  v.insert(v.end(), more.v.begin(), more.v.end());
}

template <typename T>
void Selected<T>::Clear() {
  index.clear();
  r.clear();
  v.clear();
}

template <typename T>
bool Accumulate(CpuLevel level, const SelectRule<T>& rule, const AccumulateBlock<T>& block,
                Selected<T>& selected) {
#if defined(__x86_64__)
  if constexpr (sizeof(T) == sizeof(float)) {
    if (level >= CpuLevel::kAvx2) return AccumulateWithAvx2(rule, block, selected);
  }
#endif
  (void)level;
  Gathered<T> out;
  bool finite = true;
  for (int64_t begin = 0; begin < block.count; begin += kGather) {
    const int64_t end = std::min(begin + kGather, block.count);
    finite = AccumulateScalar(rule, block, begin, end, out) && finite;
    out.MoveTo(selected, block.v != nullptr);
  }
  return finite;
}

template struct Selected<float>;
template struct Selected<double>;
template bool Accumulate<float>(CpuLevel, const SelectRule<float>&, const AccumulateBlock<float>&,
                                Selected<float>&);
template bool Accumulate<double>(CpuLevel, const SelectRule<double>&,
                                 const AccumulateBlock<double>&, Selected<double>&);

}  // namespace dad
