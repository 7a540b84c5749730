#include "exchange/layer/activation.h"

#include <numbers>

#include "util/portable_math.h"

namespace dad {

bool DerivativeFromOutput(Activation activation) {
  return activation == Activation::kRelu || activation == Activation::kLeakyRelu ||
         activation == Activation::kTanh || activation == Activation::kSigmoid;
}

bool DerivativeIsOneBit(Activation activation) {
  return activation == Activation::kRelu || activation == Activation::kLeakyRelu;
}

namespace {

template <typename T, typename Derivative>
void Apply(const T* x, int64_t count, T* d, Derivative derivative) {
  for (int64_t i = 0; i < count; ++i) d[i] *= static_cast<T>(derivative(x[i]));
}

// h Φ(h) with the normal distribution Φ.
double GeluDerivative(double h) {
  const double cdf = 0.5 * (1.0 + PortableErf(h * (std::numbers::sqrt2 / 2)));
  const double pdf =
      PortableExp(-0.5 * h * h) * (0.5 * std::numbers::inv_sqrtpi * std::numbers::sqrt2);
  return cdf + h * pdf;
}

// Its usual approximation: h/2 (1 + tanh(β (h + κ h³))).
double GeluTanhDerivative(double h) {
  constexpr double kBeta = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;
  constexpr double kKappa = 0.044715;
  const double t = PortableTanh(kBeta * (h + kKappa * h * h * h));
  return 0.5 * (1.0 + t) + 0.5 * h * (1.0 - t * t) * kBeta * (1.0 + 3.0 * kKappa * h * h);
}

double SiluDerivative(double h) {
  const double sigmoid = 1.0 / (1.0 + PortableExp(-h));
  return sigmoid * (1.0 + h * (1.0 - sigmoid));
}

}  // namespace

template <typename T>
void MultiplyByDerivative(Activation activation, double slope, const T* x, int64_t count, T* d) {
  const T below = static_cast<T>(slope);
  switch (activation) {
    case Activation::kNone: return;
    // Not d *= 0: a gradient that is not finite must not become NaN where torch has 0. And not
    // x > 0: where x is NaN torch lets the gradient through, and nobody must miss that.
    case Activation::kRelu:
      for (int64_t i = 0; i < count; ++i) d[i] = x[i] <= T(0) ? T(0) : d[i];
      return;
    case Activation::kLeakyRelu:
      return Apply(x, count, d, [below](T y) { return y > T(0) ? T(1) : below; });
    case Activation::kTanh: return Apply(x, count, d, [](T y) { return T(1) - y * y; });
    case Activation::kSigmoid: return Apply(x, count, d, [](T y) { return y * (T(1) - y); });
    case Activation::kGelu: return Apply(x, count, d, GeluDerivative);
    case Activation::kGeluTanh: return Apply(x, count, d, GeluTanhDerivative);
    case Activation::kSilu: return Apply(x, count, d, SiluDerivative);
  }
}

template <typename T>
void MultiplyByBits(Activation activation, double slope, const uint8_t* bits, int64_t count, T* d) {
  const T below = static_cast<T>(slope);
  for (int64_t i = 0; i < count; ++i) {
    if ((bits[i >> 3] >> (i & 7) & 1) != 0) continue;
    d[i] = activation == Activation::kRelu ? T(0) : d[i] * below;
  }
}

template void MultiplyByDerivative(Activation, double, const float*, int64_t, float*);
template void MultiplyByDerivative(Activation, double, const double*, int64_t, double*);
template void MultiplyByBits(Activation, double, const uint8_t*, int64_t, float*);
template void MultiplyByBits(Activation, double, const uint8_t*, int64_t, double*);

}  // namespace dad
