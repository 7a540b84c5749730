#include "linalg/adasum_kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "util/half.h"

namespace dad {
namespace {

template <typename T, typename ToDouble>
void Widen(const void* from, double* to, int64_t count, double scale, ToDouble to_double) {
  const auto* bytes = static_cast<const std::byte*>(from);
  for (int64_t i = 0; i < count; ++i) {
    T x;
    std::memcpy(&x, bytes + i * static_cast<int64_t>(sizeof x), sizeof x);
    to[i] = scale * to_double(x);
  }
}

template <typename T, typename FromDouble>
void Narrow(const double* from, void* to, int64_t count, double scale, FromDouble from_double) {
  auto* bytes = static_cast<std::byte*>(to);
  for (int64_t i = 0; i < count; ++i) {
    const T x = from_double(scale * from[i]);
    std::memcpy(bytes + i * static_cast<int64_t>(sizeof x), &x, sizeof x);
  }
}

}  // namespace

PairDots Dots(const double* a, const double* b, int64_t count) {
  // Several sums side by side: one alone would wait for each addition.
  constexpr int kLanes = 4;
  PairDots lanes[kLanes];
  for (int64_t i = 0; i < count; ++i) {
    PairDots& lane = lanes[i % kLanes];
    lane.ab += a[i] * b[i];
    lane.aa += a[i] * a[i];
    lane.bb += b[i] * b[i];
  }
  PairDots sum;
  for (const PairDots& lane : lanes) {
    sum.ab += lane.ab;
    sum.aa += lane.aa;
    sum.bb += lane.bb;
  }
  return sum;
}

void CombineAdasum(double* a, const double* b, int64_t count, const PairDots& dots) {
  const double of_a = dots.aa == 0 ? 1.0 : 1.0 - dots.ab / (2 * dots.aa);
  const double of_b = dots.bb == 0 ? 1.0 : 1.0 - dots.ab / (2 * dots.bb);
  for (int64_t i = 0; i < count; ++i) a[i] = of_a * a[i] + of_b * b[i];
}

void ScaleToDouble(const void* from, double* to, int64_t count, DType dtype, double scale) {
  if (from == nullptr) {
    std::fill_n(to, count, 0.0);
  } else if (dtype == DType::kFloat16) {
    Widen<uint16_t>(from, to, count, scale, HalfToFloat);
  } else if (dtype == DType::kBFloat16) {
    Widen<uint16_t>(from, to, count, scale, BFloat16ToFloat);
  } else if (dtype == DType::kFloat32) {
    Widen<float>(from, to, count, scale, [](float x) { return x; });
  } else {
    Widen<double>(from, to, count, scale, [](double x) { return x; });
  }
}

void ScaleFromDouble(const double* from, void* to, int64_t count, DType dtype, double scale) {
  if (dtype == DType::kFloat16) {
    Narrow<uint16_t>(from, to, count, scale,
                     [](double x) { return FloatToHalf(static_cast<float>(x)); });
  } else if (dtype == DType::kBFloat16) {
    Narrow<uint16_t>(from, to, count, scale,
                     [](double x) { return FloatToBFloat16(static_cast<float>(x)); });
  } else if (dtype == DType::kFloat32) {
    Narrow<float>(from, to, count, scale, [](double x) { return static_cast<float>(x); });
  } else {
    Narrow<double>(from, to, count, scale, [](double x) { return x; });
  }
}

}  // namespace dad
