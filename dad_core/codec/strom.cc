#include "codec/strom.h"

#include <algorithm>
#include <cmath>

// The sum over lanes is worth vectorising at any -O level of the build.
#pragma GCC optimize("O3")

namespace dad {
namespace {

constexpr int kSign = 8;
constexpr int kMostMultiples = 8;
constexpr int64_t kLanes = 8;
constexpr int64_t kSumOver = 1 << 16;

}  // namespace

template <typename T>
double RootMeanSquare(const T* g, int64_t count, T scale) {
  if (count == 0) return 0.0;
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kSumOver) {
    const int64_t end = std::min(begin + kSumOver, count);
    double lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const auto x = static_cast<double>(g[i + lane] * scale);
        lanes[lane] += x * x;
      }
    }
    for (; i < end; ++i) {
      const auto x = static_cast<double>(g[i] * scale);
      lanes[i - begin - (end - begin) / kLanes * kLanes] += x * x;
    }
    double sum = 0;
    for (double lane : lanes) sum += lane;
    total += sum;
  }
  return std::sqrt(total / static_cast<double>(count));
}

template <typename T>
Coded EncodeStrom(float tau, bool multiples, const Selected<T>& selected, T* r, T* v) {
  Coded coded;
  coded.index = selected.index;
  coded.code.reserve(selected.index.size());
  for (size_t k = 0; k < selected.index.size(); ++k) {
    const uint32_t i = selected.index[k];
    const T was = selected.r[k];
    const bool negative = std::signbit(was);
    const double size = std::fabs(static_cast<double>(was));
    const double most = multiples ? kMostMultiples : 1;
    const int m =
        static_cast<int>(std::clamp(std::floor(size / static_cast<double>(tau)), 1.0, most));
    const T sent = static_cast<T>(m) * static_cast<T>(tau);
    r[i] = negative ? was + sent : was - sent;
    if (v != nullptr) {
      const auto wide = static_cast<double>(sent);
      const double left = static_cast<double>(selected.v[k]) - 2 * size * wide + wide * wide;
      v[i] = static_cast<T>(std::max(left, 0.0));
    }
    coded.code.push_back(
        static_cast<uint8_t>(multiples ? m - 1 + (negative ? kSign : 0) : negative));
  }
  return coded;
}

template <typename T>
void StromValues(float tau, bool multiples, T* values) {
  if (!multiples) {
    values[0] = static_cast<T>(tau);
    values[1] = -values[0];
    return;
  }
  for (int m = 1; m <= kMostMultiples; ++m) {
    values[m - 1] = static_cast<T>(m) * static_cast<T>(tau);
    values[m - 1 + kSign] = -values[m - 1];
  }
}

#define DAD_INSTANTIATE(T)                                                \
  template double RootMeanSquare<T>(const T*, int64_t, T);                \
  template Coded EncodeStrom<T>(float, bool, const Selected<T>&, T*, T*); \
  template void StromValues<T>(float, bool, T*)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
