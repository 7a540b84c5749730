#include "linalg/reduce.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "linalg/finite.h"
#include "util/half.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The loops below are worth vectorising at any -O level of the build.
#pragma GCC optimize("O3")

namespace dad {
namespace {

// Everything between the entry of a level and its innermost loop is inlined, so that the
// loops are compiled for that level.
#define DAD_INLINE [[gnu::always_inline]] static inline

// Accumulators stay in the first-level cache while the inputs stream past.
constexpr int64_t kBlock = 1024;

struct Job {
  std::span<const std::byte* const> inputs;  // of the ranks that contribute; at least one
  std::byte* out;
  int64_t count;
  double prescale;
  double postscale;
  int group_size;
};

// Messages are fused without padding: elements may lie at any address.
template <typename T>
struct [[gnu::packed, gnu::may_alias]] Unaligned {
  T value;
};

template <typename T>
DAD_INLINE T LoadAt(const std::byte* from, int64_t i) {
  return reinterpret_cast<const Unaligned<T>*>(from)[i].value;
}

template <typename T>
DAD_INLINE void StoreAt(std::byte* to, int64_t i, T value) {
  reinterpret_cast<Unaligned<T>*>(to)[i].value = value;
}

// How an element type is read into accumulators, a block at a time, and written back.

template <typename T>
struct FloatElement {
  using Acc = T;
  static constexpr size_t kBytes = sizeof(T);
  DAD_INLINE Acc Load(const std::byte* from, int64_t i) { return LoadAt<T>(from, i); }
  DAD_INLINE void Store(std::byte* to, int64_t i, Acc x) { StoreAt<T>(to, i, x); }
  DAD_INLINE Acc Scale(Acc x, double factor) { return static_cast<Acc>(factor) * x; }
  DAD_INLINE Acc Divide(Acc x, int n) { return x / static_cast<Acc>(n); }
};

struct BFloat16Element : FloatElement<float> {
  static constexpr size_t kBytes = 2;
  DAD_INLINE float Load(const std::byte* from, int64_t i) {
    return BFloat16ToFloat(LoadAt<uint16_t>(from, i));
  }
  DAD_INLINE void Store(std::byte* to, int64_t i, float x) {
    StoreAt<uint16_t>(to, i, FloatToBFloat16(x));
  }
};

struct HalfElement : FloatElement<float> {
  static constexpr size_t kBytes = 2;
  DAD_INLINE float Load(const std::byte* from, int64_t i) {
    return HalfToFloat(LoadAt<uint16_t>(from, i));
  }
  DAD_INLINE void Store(std::byte* to, int64_t i, float x) {
    StoreAt<uint16_t>(to, i, FloatToHalf(x));
  }
};

#if defined(__x86_64__)
// float16 with F16C, which the compiler does not find in HalfElement: whole blocks are
// converted on the way in and out.
struct HalfF16cElement : FloatElement<float> {
  static constexpr size_t kBytes = 2;
  [[gnu::target("avx2,f16c")]] static void Widen(float* to, const std::byte* from, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const auto* half = reinterpret_cast<const __m128i*>(from + 2 * i);
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(half)));
    }
    for (; i < n; ++i) to[i] = HalfToFloat(LoadAt<uint16_t>(from, i));
  }
  [[gnu::target("avx2,f16c")]] static void Narrow(std::byte* to, const float* from, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), half);
    }
    for (; i < n; ++i) StoreAt<uint16_t>(to, i, FloatToHalf(from[i]));
  }
};
#endif

template <typename Element>
concept Staged = requires {
  &Element::Widen;
};

template <typename T>
struct IntElement {
  using Acc = int64_t;
  static constexpr size_t kBytes = sizeof(T);
  DAD_INLINE Acc Load(const std::byte* from, int64_t i) { return LoadAt<T>(from, i); }
  DAD_INLINE void Store(std::byte* to, int64_t i, Acc x) { StoreAt<T>(to, i, static_cast<T>(x)); }
  DAD_INLINE Acc Scale(Acc x, double factor) {
    const double y = factor * static_cast<double>(x);
    if (y != y) return 0;
    if (y < -0x1p63) return std::numeric_limits<int64_t>::min();
    if (y >= 0x1p63) return std::numeric_limits<int64_t>::max();
    return static_cast<int64_t>(y);
  }
  DAD_INLINE Acc Divide(Acc x, int n) { return x / n; }
};

struct BoolElement : IntElement<uint8_t> {
  DAD_INLINE Acc Load(const std::byte* from, int64_t i) {
    return LoadAt<uint8_t>(from, i) != 0 ? 1 : 0;
  }
  DAD_INLINE void Store(std::byte* to, int64_t i, Acc x) {
    StoreAt<uint8_t>(to, i, x != 0 ? 1 : 0);
  }
};

template <ReduceOp op, typename Acc>
DAD_INLINE Acc Combine(Acc a, Acc x) {
  // Integers wrap: through unsigned, where that is defined.
  if constexpr (op == ReduceOp::kMin) {
    return (x < a || x != x) ? x : a;
  } else if constexpr (op == ReduceOp::kMax) {
    return (x > a || x != x) ? x : a;
  } else if constexpr (std::is_integral_v<Acc>) {
    const uint64_t ua = static_cast<uint64_t>(a), ux = static_cast<uint64_t>(x);
    return static_cast<Acc>(op == ReduceOp::kProduct ? ua * ux : ua + ux);
  } else {
    return op == ReduceOp::kProduct ? a * x : a + x;
  }
}

// Watches the results of sums of floats; ignores all others.
struct Unwatched {
  template <typename Acc>
  [[gnu::always_inline]] void See(Acc) {}
  bool all_finite() const { return true; }
};
template <ReduceOp op, typename Acc>
using Watch = std::conditional_t<std::is_floating_point_v<Acc> &&
                                     (op == ReduceOp::kSum || op == ReduceOp::kAverage),
                                 FiniteCheck<Acc>, Unwatched>;

// Takes one input's block into `acc`.
template <typename Element, ReduceOp op, bool scaled, typename Acc>
DAD_INLINE void TakeBlock(Acc* __restrict acc, const std::byte* from, int64_t n, double prescale,
                          bool first) {
  if constexpr (Staged<Element>) {
    alignas(64) Acc widened[kBlock];
    Element::Widen(widened, from, n);
    const auto* bytes = reinterpret_cast<const std::byte*>(widened);
    TakeBlock<FloatElement<Acc>, op, scaled>(acc, bytes, n, prescale, first);
  } else if (first) {
    for (int64_t i = 0; i < n; ++i) {
      const Acc x = Element::Load(from, i);
      acc[i] = scaled ? Element::Scale(x, prescale) : x;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const Acc x = Element::Load(from, i);
      acc[i] = Combine<op>(acc[i], scaled ? Element::Scale(x, prescale) : x);
    }
  }
}

template <typename Element, ReduceOp op, bool scaled, typename Acc>
DAD_INLINE void TakeAllInputs(Acc* __restrict acc, const Job& job, int64_t begin, int64_t n) {
  bool first = true;
  for (const std::byte* input : job.inputs) {
    const std::byte* from = input + begin * static_cast<int64_t>(Element::kBytes);
    TakeBlock<Element, op, scaled>(acc, from, n, job.prescale, first);
    first = false;
  }
}

// The road of most gradients: plain sums and averages of few ranks, straight from all
// inputs to the output. Several streams read at once make the best of memory.
template <typename Element, ReduceOp op, int num_inputs>
DAD_INLINE bool ReduceAtOnce(const Job& job) {
  const std::byte* from[num_inputs];
  for (int k = 0; k < num_inputs; ++k) from[k] = job.inputs[static_cast<size_t>(k)];
  std::byte* to = job.out;
  const int64_t count = job.count;
  const int group_size = job.group_size;
  Watch<op, typename Element::Acc> watch;
#pragma GCC ivdep  // `to` may be one of `from`: an element is read before it is written
  for (int64_t i = 0; i < count; ++i) {
    auto sum = Element::Load(from[0], i);
    for (int k = 1; k < num_inputs; ++k) sum = Combine<op>(sum, Element::Load(from[k], i));
    if constexpr (op == ReduceOp::kAverage) sum = Element::Divide(sum, group_size);
    watch.See(sum);
    Element::Store(to, i, sum);
  }
  return watch.all_finite();
}

template <typename Element, ReduceOp op>
DAD_INLINE bool ReduceBlocks(const Job& job) {
  using Acc = typename Element::Acc;
  alignas(64) Acc acc[kBlock];
  Watch<op, Acc> watch;
  for (int64_t begin = 0; begin < job.count; begin += kBlock) {
    const int64_t n = std::min(kBlock, job.count - begin);
    if (job.prescale == 1.0) {
      TakeAllInputs<Element, op, false>(acc, job, begin, n);
    } else {
      TakeAllInputs<Element, op, true>(acc, job, begin, n);
    }
    // Watched in a loop that is there anyway, if there is one.
    if constexpr (op == ReduceOp::kAverage) {
      for (int64_t i = 0; i < n; ++i) {
        acc[i] = Element::Divide(acc[i], job.group_size);
        watch.See(acc[i]);
      }
    } else if constexpr (Staged<Element>) {
      for (int64_t i = 0; i < n; ++i) watch.See(acc[i]);
    }
    if (job.postscale != 1.0) {
      for (int64_t i = 0; i < n; ++i) acc[i] = Element::Scale(acc[i], job.postscale);
    }
    std::byte* to = job.out + begin * static_cast<int64_t>(Element::kBytes);
    if constexpr (Staged<Element>) {
      Element::Narrow(to, acc, n);
    } else {
      for (int64_t i = 0; i < n; ++i) {
        if constexpr (op != ReduceOp::kAverage) watch.See(acc[i]);
        Element::Store(to, i, acc[i]);
      }
    }
  }
  return watch.all_finite();
}

template <typename Element, ReduceOp op>
DAD_INLINE bool Reduce(const Job& job) {
  constexpr bool is_gradient_sum = std::is_same_v<Element, FloatElement<typename Element::Acc>> &&
                                   (op == ReduceOp::kSum || op == ReduceOp::kAverage);
  if constexpr (is_gradient_sum) {
    if (job.prescale != 1.0 || job.postscale != 1.0) return ReduceBlocks<Element, op>(job);
    switch (job.inputs.size()) {
      case 1: return ReduceAtOnce<Element, op, 1>(job);
      case 2: return ReduceAtOnce<Element, op, 2>(job);
      case 3: return ReduceAtOnce<Element, op, 3>(job);
      case 4: return ReduceAtOnce<Element, op, 4>(job);
      case 5: return ReduceAtOnce<Element, op, 5>(job);
      case 6: return ReduceAtOnce<Element, op, 6>(job);
      case 7: return ReduceAtOnce<Element, op, 7>(job);
      case 8: return ReduceAtOnce<Element, op, 8>(job);
      default: break;
    }
  }
  return ReduceBlocks<Element, op>(job);
}

template <typename Element, ReduceOp op>
bool ReduceBaseline(const Job& job) {
  return Reduce<Element, op>(job);
}

#if defined(__x86_64__)
template <typename Element, ReduceOp op>
[[gnu::target("avx2,f16c")]] bool ReduceAvx2(const Job& job) {
  return Reduce<Element, op>(job);
}
#endif

using Kernel = bool (*)(const Job&);

template <typename Element, ReduceOp op>
Kernel KernelAt(CpuLevel level) {
#if defined(__x86_64__)
  if (level >= CpuLevel::kAvx2) {
    using Avx2Element =
        std::conditional_t<std::is_same_v<Element, HalfElement>, HalfF16cElement, Element>;
    return ReduceAvx2<Avx2Element, op>;
  }
#endif
  (void)level;
  return ReduceBaseline<Element, op>;
}

template <typename Element>
Kernel KernelOf(ReduceOp op, CpuLevel level) {
  switch (op) {
    case ReduceOp::kSum: return KernelAt<Element, ReduceOp::kSum>(level);
    case ReduceOp::kAverage: return KernelAt<Element, ReduceOp::kAverage>(level);
    case ReduceOp::kMin: return KernelAt<Element, ReduceOp::kMin>(level);
    case ReduceOp::kMax: return KernelAt<Element, ReduceOp::kMax>(level);
    case ReduceOp::kProduct: return KernelAt<Element, ReduceOp::kProduct>(level);
    case ReduceOp::kAdasum: break;
  }
  return nullptr;
}

Kernel FindKernel(DType dtype, ReduceOp op, CpuLevel level) {
  switch (dtype) {
    case DType::kUint8: return KernelOf<IntElement<uint8_t>>(op, level);
    case DType::kInt8: return KernelOf<IntElement<int8_t>>(op, level);
    case DType::kInt16: return KernelOf<IntElement<int16_t>>(op, level);
    case DType::kInt32: return KernelOf<IntElement<int32_t>>(op, level);
    case DType::kInt64: return KernelOf<IntElement<int64_t>>(op, level);
    case DType::kFloat16: return KernelOf<HalfElement>(op, level);
    case DType::kBFloat16: return KernelOf<BFloat16Element>(op, level);
    case DType::kFloat32: return KernelOf<FloatElement<float>>(op, level);
    case DType::kFloat64: return KernelOf<FloatElement<double>>(op, level);
    case DType::kBool: return KernelOf<BoolElement>(op, level);
    case DType::kUint16: return KernelOf<IntElement<uint16_t>>(op, level);
  }
  return nullptr;
}

}  // namespace

bool ReduceInRankOrderAt(CpuLevel level, std::span<const void* const> inputs, void* out,
                         int64_t count, DType dtype, ReduceOp op, double prescale, double postscale,
                         int group_size) {
  if (count == 0) return true;
  std::vector<const std::byte*> present;
  present.reserve(inputs.size());
  for (const void* input : inputs) {
    if (input != nullptr) present.push_back(static_cast<const std::byte*>(input));
  }
  if (present.empty()) {
    std::memset(out, 0, static_cast<size_t>(count) * SizeOf(dtype));
    return true;
  }
  return FindKernel(dtype, op, level)(
      {present, static_cast<std::byte*>(out), count, prescale, postscale, group_size});
}

bool ReduceInRankOrder(std::span<const void* const> inputs, void* out, int64_t count, DType dtype,
                       ReduceOp op, double prescale, double postscale, int group_size) {
  return ReduceInRankOrderAt(BestCpuLevel(), inputs, out, count, dtype, op, prescale, postscale,
                             group_size);
}

int FirstNotFinite(std::span<const void* const> inputs, const void* out, int64_t count,
                   DType dtype) {
  int overwritten = -1;
  std::byte sums[kBlock * sizeof(double)];
  const auto is_finite = [&](const void* input) {
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const void* const block[] = {static_cast<const std::byte*>(input) +
                                   static_cast<size_t>(begin) * SizeOf(dtype)};
      const int64_t n = std::min(kBlock, count - begin);
      if (!ReduceInRankOrder(block, sums, n, dtype, ReduceOp::kSum, 1.0, 1.0, 1)) return false;
    }
    return true;
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i] == out && out != nullptr) {
      overwritten = static_cast<int>(i);
    } else if (inputs[i] != nullptr && !is_finite(inputs[i])) {
      return static_cast<int>(i);
    }
  }
  return overwritten;
}

}  // namespace dad
