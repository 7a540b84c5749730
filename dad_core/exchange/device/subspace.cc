#include "exchange/device/subspace.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace dad {

Status MultiplyRight(DeviceBench& bench, const DeviceResidual& e, int64_t r, const float* v,
                     float* p) {
  const Result<DeviceProducts*> products = bench.Products();
  if (!products.ok()) return products.status();
  const CudaDeviceGuard guard(bench.cuda(), bench.device());
  DAD_RETURN_IF_ERROR(products.value()->Multiply<float>({v, r, e.n, e.columns()}, false,
                                                        {e.weight, e.m, e.n}, true, {p, r, e.m}));
  if (e.bias == nullptr) return Status::Ok();
  return products.value()->Multiply<float>({v + e.n, r, 1, e.columns()}, false, {e.bias, e.m, 1},
                                           true, {p, r, e.m}, 1.0f, 1.0f);
}

Status MultiplyLeft(DeviceBench& bench, const DeviceResidual& e, int64_t r, const float* u,
                    float* q) {
  const Result<DeviceProducts*> products = bench.Products();
  if (!products.ok()) return products.status();
  const CudaDeviceGuard guard(bench.cuda(), bench.device());
  DAD_RETURN_IF_ERROR(products.value()->Multiply<float>({u, r, e.m}, false, {e.weight, e.m, e.n},
                                                        false, {q, r, e.n, e.columns()}));
  if (e.bias == nullptr) return Status::Ok();
  return products.value()->Multiply<float>({u, r, e.m}, false, {e.bias, e.m, 1}, false,
                                           {q + e.n, r, 1, e.columns()});
}

Status DeviceSubspace::Open() {
  const int64_t longest = std::max(e_.m, e_.columns());
  p_ = arena_.Take<float>(bench_, r_ * e_.m);
  q_ = arena_.Take<float>(bench_, r_ * e_.columns());
  tall_ = arena_.Take<double>(bench_, r_ * longest);
  u_ = arena_.Take<double>(bench_, r_ * longest);  // the two change places
  v_ = arena_.Take<double>(bench_, r_ * e_.columns());
  gram_ = arena_.Take<double>(bench_, r_ * r_);
  mix_ = arena_.Take<double>(bench_, r_ * r_);
  turn_ = arena_.Take<double>(bench_, r_ * r_);
  scratch_ = arena_.Take<double>(bench_, 2 * r_ * r_);
  sigma_ = arena_.Take<double>(bench_, r_);
  kept_ = arena_.Take<int>(bench_, 1);
  DAD_RETURN_IF_ERROR(arena_.status());
  if (options_.energy == 0 || e_.weight == nullptr) return Status::Ok();
  // Partial sums of the matrix, followed by those of its last column.
  const int64_t parts[] = {cuda::DivideUp(e_.m * e_.n, cuda::kSumOver),
                           cuda::DivideUp(e_.bias != nullptr ? e_.m : 0, cuda::kSumOver)};
  num_squares_ = parts[0] + parts[1];
  squares_ = arena_.Take<double>(bench_, num_squares_);
  DAD_RETURN_IF_ERROR(arena_.status());
  DAD_RETURN_IF_ERROR(
      bench_.Run<cuda::SumSquaresKernel<float>>({e_.weight, e_.m * e_.n, 1.0f, squares_}));
  if (parts[1] == 0) return Status::Ok();
  return bench_.Run<cuda::SumSquaresKernel<float>>({e_.bias, e_.m, 1.0f, squares_ + parts[0]});
}

Status DeviceSubspace::Pass(float* v) {
  DAD_RETURN_IF_ERROR(MultiplyRight(bench_, e_, r_, v, p_));
  DAD_RETURN_IF_ERROR(Widen(p_, r_ * e_.m, tall_));
  DAD_RETURN_IF_ERROR(Orthonormalise());
  // In float again, in the place of P.
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::NarrowRowsKernel>({u_, r_, e_.m, nullptr, p_}));
  DAD_RETURN_IF_ERROR(MultiplyLeft(bench_, e_, r_, p_, q_));
  DAD_RETURN_IF_ERROR(Widen(q_, r_ * e_.columns(), tall_));
  return Turn(v);
}

Status DeviceSubspace::OfRows(const double* d, const double* a, float* v) {
  const Result<DeviceProducts*> products = bench_.Products();
  if (!products.ok()) return products.status();
  DAD_RETURN_IF_ERROR(bench_.Copy(tall_, d, static_cast<size_t>(r_ * e_.m) * sizeof *d));
  DAD_RETURN_IF_ERROR(Orthonormalise());
  {
    const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
    DAD_RETURN_IF_ERROR(products.value()->Multiply<double>({u_, r_, e_.m}, false, {d, r_, e_.m},
                                                           true, {mix_, r_, r_}));
    DAD_RETURN_IF_ERROR(products.value()->Multiply<double>(
        {mix_, r_, r_}, false, {a, r_, e_.columns()}, false, {tall_, r_, e_.columns()}));
  }
  return Turn(v);
}

// What the rows of u are multiplied with is in tall_.
Status DeviceSubspace::Turn(float* v) {
  const Result<DeviceProducts*> products = bench_.Products();
  if (!products.ok()) return products.status();
  const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
  const int64_t columns = e_.columns();
  const DeviceMatrix<const double> q{tall_, r_, columns};
  DAD_RETURN_IF_ERROR(products.value()->Multiply<double>(q, false, q, true, {gram_, r_, r_}));
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::PrincipalKernel>(
      {static_cast<int>(r_), options_.rank, options_.tol, options_.energy, squares_, num_squares_,
       gram_, scratch_, turn_, sigma_, kept_}));
  DAD_RETURN_IF_ERROR(
      products.value()->Multiply<double>({turn_, r_, r_}, false, q, false, {v_, r_, columns}));
  return bench_.Run<cuda::NextStartKernel>(
      {v_, sigma_, kZeroNorm<float>, options_.rank, columns, kRefillSeed, RandomScale(columns), v});
}

// The rows in tall_. Twice: the second time mends what rounding in the inner products has cost the
// first.
Status DeviceSubspace::Orthonormalise() {
  const Result<DeviceProducts*> products = bench_.Products();
  if (!products.ok()) return products.status();
  DeviceProducts& multiply = *products.value();
  const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
  double* from = tall_;
  double* to = u_;
  for (const bool first : {true, false}) {
    const DeviceMatrix<const double> x{from, r_, e_.m};
    DAD_RETURN_IF_ERROR(multiply.Multiply<double>(x, false, x, true, {gram_, r_, r_}));
    DAD_RETURN_IF_ERROR(bench_.Run<cuda::OrthonormaliseKernel>(
        {static_cast<int>(r_), first ? kZeroNorm<float> : 0.0, first ? kZeroAngle<float> : 0.0,
         gram_, scratch_, mix_}));
    DAD_RETURN_IF_ERROR(multiply.Multiply<double>({mix_, r_, r_}, false, x, false, {to, r_, e_.m}));
    std::swap(from, to);
  }
  std::swap(tall_, u_);  // the second result lies where the first began
  return Status::Ok();
}

Status DeviceSubspace::Factors(float* ut, float* vt) {
  const Result<DeviceProducts*> products = bench_.Products();
  if (!products.ok()) return products.status();
  const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
  const int64_t sent = options_.rank;
  DAD_RETURN_IF_ERROR(products.value()->Multiply<double>({turn_, sent, r_}, false, {u_, r_, e_.m},
                                                         false, {tall_, sent, e_.m}));
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::NarrowRowsKernel>({tall_, sent, e_.m, kept_, ut}));
  return bench_.Run<cuda::NarrowRowsKernel>({v_, sent, e_.columns(), kept_, vt});
}

Status DeviceSubspace::Widen(const float* from, int64_t count, double* to) {
  return bench_.Run<cuda::WidenKernel<float, double>>({from, count, to});
}

}  // namespace dad
