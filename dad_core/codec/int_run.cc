#include "codec/int_run.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "linalg/cpu_level.h"

// The loops below are worth vectorising at any -O level of the build.
#pragma GCC optimize("O3")

namespace dad {
namespace {

#define DAD_INLINE [[gnu::always_inline]] static inline

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// Loops as types, so that each can be compiled at each level.

struct LargestMagnitude {
  // Bit patterns without the sign order like the values, with NaN above infinity; unlike
  // a maximum of floats the compiler can make vectors of this.
  template <typename T>
  DAD_INLINE Bits<T> Run(const T* x, int64_t count) {
    Bits<T> largest = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Bits<T> magnitude = std::bit_cast<Bits<T>>(x[i]) & std::numeric_limits<Bits<T>>::max();
      largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
  }
};

struct ToInts {
  template <typename T>
  DAD_INLINE void Run(const T* x, int64_t count, T inverse, int limit, int8_t* __restrict out) {
    // Adding this leaves no room for a fraction, so the addition rounds.
    constexpr T kRound = sizeof(T) == 4 ? T(0x1.8p23) : T(0x1.8p52);
    for (int64_t i = 0; i < count; ++i) {
      const T rounded = (x[i] * inverse + kRound) - kRound;
      const auto q = static_cast<int32_t>(rounded);
      out[i] = static_cast<int8_t>(q > limit ? limit : q < -limit ? -limit : q);
    }
  }
};

struct FromInts {
  template <typename T>
  DAD_INLINE void Run(const int8_t* in, int64_t count, T scale, bool add, T* __restrict x) {
    if (add) {
      for (int64_t i = 0; i < count; ++i) x[i] += scale * static_cast<T>(in[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) x[i] = scale * static_cast<T>(in[i]);
    }
  }
};

struct Outside {
  DAD_INLINE int Run(const int8_t* in, int64_t count, int limit) {
    const auto most = static_cast<int8_t>(limit);
    const auto least = static_cast<int8_t>(-limit);
    uint8_t outside = 0;
    for (int64_t i = 0; i < count; ++i) {
      outside = static_cast<uint8_t>(outside | (in[i] > most) | (in[i] < least));
    }
    return outside;
  }
};

#if defined(__x86_64__)
template <typename Loop, typename... Args>
[[gnu::target("avx2")]] auto AtAvx2(Args... args) {
  return Loop::Run(args...);
}
#endif

template <typename Loop, typename... Args>
auto AtBaseline(Args... args) {
  return Loop::Run(args...);
}

template <typename Loop, typename... Args>
auto AtBest(Args... args) {
#if defined(__x86_64__)
  if (BestCpuLevel() >= CpuLevel::kAvx2) return AtAvx2<Loop>(args...);
#endif
  return AtBaseline<Loop>(args...);
}

}  // namespace

template <typename T>
float ScaleOfRun(const T* x, int64_t count, int limit) {
  const T largest = std::bit_cast<T>(AtBest<LargestMagnitude>(x, count));
  const T scale = largest / static_cast<T>(limit);
  if (!(scale <= static_cast<T>(std::numeric_limits<float>::max()))) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  auto rounded = static_cast<float>(scale);
  // At the end of the range, limit · scale must not have been rounded up to infinity.
  if (std::isinf(static_cast<float>(limit) * rounded)) rounded = std::nextafter(rounded, 0.0f);
  return rounded >= std::numeric_limits<float>::min() ? rounded : 0.0f;
}

template <typename T>
void RunToInts(const T* x, int64_t count, float scale, int limit, int8_t* out) {
  if (!(scale > 0)) {
    std::fill_n(out, count, int8_t{0});
  } else {
    AtBest<ToInts>(x, count, T{1} / static_cast<T>(scale), limit, out);
  }
}

template <typename T>
void IntsToRun(const int8_t* in, int64_t count, float scale, bool add, T* x) {
  AtBest<FromInts>(in, count, static_cast<T>(scale), add, x);
}

bool IsScale(float scale) {
  const bool normal =
      scale >= std::numeric_limits<float>::min() && scale <= std::numeric_limits<float>::max();
  return normal || std::isnan(scale) || std::bit_cast<uint32_t>(scale) == 0;
}

bool IntsAreWithin(const int8_t* in, int64_t count, int limit) {
  return AtBest<Outside>(in, count, limit) == 0;
}

#define DAD_INSTANTIATE(T)                                            \
  template float ScaleOfRun<T>(const T*, int64_t, int);               \
  template void RunToInts<T>(const T*, int64_t, float, int, int8_t*); \
  template void IntsToRun<T>(const int8_t*, int64_t, float, bool, T*)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
