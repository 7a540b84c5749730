// Products and the kernels of subspace iteration: calls and sizes on the recording fake of cuBLAS,
// which computes on the host, and the kernels emulated. No GPU has run any of it.
#include "exchange/device/subspace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "codec/cuda/subspace_kernels.h"
#include "codec/factor_wire.h"
#include "device/events.h"
#include "emulate.h"
#include "fake_gpu.h"
#include "util/half.h"

namespace dad {
namespace {

template <typename T>
std::vector<T> Random(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& x : values) x = static_cast<T>(normal(random));
  return values;
}

// x xᵀ of rows.
std::vector<double> Gram(const std::vector<double>& x, int64_t rows) {
  const int64_t cols = static_cast<int64_t>(x.size()) / rows;
  std::vector<double> gram(static_cast<size_t>(rows * rows));
  for (int64_t a = 0; a < rows; ++a) {
    for (int64_t b = 0; b < rows; ++b) {
      for (int64_t i = 0; i < cols; ++i) gram[a * rows + b] += x[a * cols + i] * x[b * cols + i];
    }
  }
  return gram;
}

// w x.
std::vector<double> Mixed(const std::vector<double>& w, const std::vector<double>& x,
                          int64_t rows) {
  const int64_t cols = static_cast<int64_t>(x.size()) / rows;
  std::vector<double> out(x.size());
  for (int64_t a = 0; a < rows; ++a) {
    for (int64_t k = 0; k < rows; ++k) {
      for (int64_t i = 0; i < cols; ++i) out[a * cols + i] += w[a * rows + k] * x[k * cols + i];
    }
  }
  return out;
}

class ProductsTest : public testing::Test {
 protected:
  void SetUp() override {
    fake_gpu::Reset();
    cuda_ = LoadCuda(DAD_FAKE_GPU).value();
    cublas_ = LoadCublas(DAD_FAKE_GPU).value();
    (void)cuda_.SetDevice(0);
    stream_ = NewStream(cuda_).value();
  }
  void TearDown() override {
    (void)cuda_.StreamDestroy(stream_);
    EXPECT_EQ(fake_gpu::LiveHandles(), 0);
    fake_gpu::Reset();
  }
  CudaApi cuda_;
  CublasApi cublas_;
  CudaStream stream_ = nullptr;
};

TEST_F(ProductsTest, CublasThatIsNotThereIsSaid) {
  const Status status = LoadCublas("/nowhere/libcublas.so").status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("cuBLAS"), std::string::npos) << status.message();
}

TEST_F(ProductsTest, AreRowMajorOnTheStream) {
  Result<DeviceProducts> made = DeviceProducts::Make(cublas_, stream_);
  ASSERT_TRUE(made.ok());
  DeviceProducts& products = made.value();
  constexpr int64_t kRows = 5, kIn = 3, kOut = 4;
  const auto a = Random<float>(kRows * kIn, 1);
  const auto d = Random<float>(kRows * kOut, 2);
  std::vector<float> gradient(kOut * kIn, 1);
  // The gradient of a layer: Dᵀ A, added to what is there.
  ASSERT_TRUE(products
                  .Multiply<float>({d.data(), kRows, kOut}, true, {a.data(), kRows, kIn}, false,
                                   {gradient.data(), kOut, kIn}, 2, 1)
                  .ok());
  for (int64_t o = 0; o < kOut; ++o) {
    for (int64_t i = 0; i < kIn; ++i) {
      float sum = 0;
      for (int64_t r = 0; r < kRows; ++r) sum += d[r * kOut + o] * a[r * kIn + i];
      EXPECT_NEAR(gradient[o * kIn + i], 2 * sum + 1, 1e-5);
    }
  }
  const auto log = fake_gpu::Log(0);
  EXPECT_EQ(log.back().call, "cublasSgemm");
  EXPECT_EQ(log.back().stream, stream_);
  // A Bᵀ
  std::vector<double> product(2 * 2);
  const std::vector<double> x{1, 2, 3, 4, 5, 6};
  ASSERT_TRUE(
      products
          .Multiply<double>({x.data(), 2, 3}, false, {x.data(), 2, 3}, true, {product.data(), 2, 2})
          .ok());
  EXPECT_EQ(product, (std::vector<double>{14, 32, 32, 77}));
  EXPECT_FALSE(products
                   .Multiply<double>({x.data(), 2, 3}, false, {x.data(), 2, 3}, false,
                                     {product.data(), 2, 2})
                   .ok());
}

TEST_F(ProductsTest, TakePartsOfRows) {
  Result<DeviceProducts> made = DeviceProducts::Make(cublas_, stream_);
  ASSERT_TRUE(made.ok());
  // [1 2 | 9] [5 | 8]ᵀ without the last columns, into the first column of rows of two.
  //  3 4   9   6   8
  const std::vector<double> a{1, 2, 9, 3, 4, 9}, b{5, 8, 6, 8};
  std::vector<double> c(4, -1);
  ASSERT_TRUE(made.value()
                  .Multiply<double>({a.data(), 2, 2, 3}, false, {b.data(), 2, 1, 2}, false,
                                    {&c[0], 2, 1, 2})
                  .ok());
  EXPECT_EQ(c, (std::vector<double>{17, -1, 39, -1}));
}

// ---- kernels

std::vector<double> Orthonormaliser(const std::vector<double>& gram, int n, double zero_norm,
                                    double zero_angle) {
  std::vector<double> scratch(gram.size(), std::nan("")), w(gram.size(), std::nan(""));
  cuda::Emulate<cuda::OrthonormaliseKernel>(
      {n, zero_norm, zero_angle, gram.data(), scratch.data(), w.data()});
  return w;
}

TEST(SubspaceKernelsTest, RowsBecomeOrthonormal) {
  for (const int n : {1, 2, 5, 31, 32, 33, 64, 255}) {
    const auto x = Random<double>(int64_t{300} * n, static_cast<uint32_t>(n));
    const auto u = Mixed(Orthonormaliser(Gram(x, n), n, 1e-7, 1e-5), x, n);
    const auto gram = Gram(u, n);
    for (int i = 0; i < n * n; ++i) {
      ASSERT_NEAR(gram[static_cast<size_t>(i)], i / n == i % n ? 1 : 0, 1e-9) << n;
    }
  }
}

TEST(SubspaceKernelsTest, WhatIsDependentOrNothingAddsNoDirection) {
  constexpr int kN = 5, kCols = 40;
  auto x = Random<double>(kN * kCols, 3);
  for (int i = 0; i < kCols; ++i) {
    x[static_cast<size_t>(1 * kCols + i)] = 2 * x[static_cast<size_t>(i)];
    x[static_cast<size_t>(3 * kCols + i)] = 0;
  }
  const auto u = Mixed(Orthonormaliser(Gram(x, kN), kN, 1e-7, 1e-5), x, kN);
  const auto gram = Gram(u, kN);
  for (int i = 0; i < kN; ++i) {
    EXPECT_NEAR(gram[static_cast<size_t>(i * kN + i)], i < 3 ? 1 : 0, 1e-9) << i;
  }
  // What is not finite ends, too.
  const std::vector<double> bad(kN * kN, std::numeric_limits<double>::infinity());
  EXPECT_EQ(Orthonormaliser(bad, kN, 1e-7, 1e-5), std::vector<double>(kN * kN));
}

struct Principal {
  std::vector<double> turn, sigma;
  int kept = -1;
};
Principal PrincipalOf(const std::vector<double>& gram, int n, double tol = 0, double energy = 0,
                      const std::vector<double>& squares = {}, int most = 255) {
  std::vector<double> scratch(2 * gram.size(), std::nan(""));
  Principal out{std::vector<double>(gram.size()), std::vector<double>(static_cast<size_t>(n))};
  cuda::Emulate<cuda::PrincipalKernel>(
      {n, most, tol, energy, squares.data(), static_cast<int64_t>(squares.size()), gram.data(),
       scratch.data(), out.turn.data(), out.sigma.data(), &out.kept});
  return out;
}

TEST(SubspaceKernelsTest, RowsAreTurnedToTheirPrincipalDirections) {
  for (const int n : {1, 2, 3, 5, 31, 32, 33, 64, 101}) {
    auto x = Random<double>(int64_t{120} * n, static_cast<uint32_t>(7 + n));
    for (size_t i = 0; i < x.size(); ++i) x[i] *= std::pow(0.5, static_cast<double>(i / 120 % 30));
    const auto gram = Gram(x, n);
    const Principal found = PrincipalOf(gram, n);
    EXPECT_EQ(found.kept, n);
    const auto turned = Gram(Mixed(found.turn, x, n), n);
    const double trace = found.sigma[0] * found.sigma[0];
    for (int a = 0; a < n; ++a) {
      EXPECT_LE(found.sigma[a], found.sigma[std::max(a - 1, 0)]);
      for (int b = 0; b < n; ++b) {
        const double wanted = a == b ? found.sigma[a] * found.sigma[a] : 0;
        ASSERT_NEAR(turned[static_cast<size_t>(a * n + b)], wanted, 1e-13 * trace * n) << n;
      }
    }
    // The turn is one.
    const auto turn = Gram(found.turn, n);
    for (int i = 0; i < n * n; ++i) {
      ASSERT_NEAR(turn[static_cast<size_t>(i)], i / n == i % n ? 1 : 0, 1e-12) << n;
    }
  }
}

TEST(SubspaceKernelsTest, DirectionsAreCutByToleranceEnergyAndZero) {
  const std::vector<double> gram{16, 0, 0, 0, 1, 0, 0, 0, 0};  // σ = 4, 1, 0
  EXPECT_EQ(PrincipalOf(gram, 3).kept, 2);
  EXPECT_EQ(PrincipalOf(gram, 3, 0.3).kept, 1);
  EXPECT_EQ(PrincipalOf(gram, 3, 0, 0.5, {10, 10}).kept, 1);
  EXPECT_EQ(PrincipalOf(gram, 3, 0, 0.9, {10, 10}).kept, 2);
  EXPECT_EQ(PrincipalOf(gram, 3, 0, 0.9).kept, 1);  // of what the rows have themselves: 17
  EXPECT_EQ(PrincipalOf(gram, 3, 0, 0.95).kept, 2);
  EXPECT_EQ(PrincipalOf(gram, 3, 0, 0, {}, 1).kept, 1);
  const double nan = std::nan("");
  const Principal none = PrincipalOf({nan, nan, nan, nan}, 2);
  EXPECT_EQ(none.kept, 0);
  EXPECT_EQ(none.sigma, (std::vector<double>{0, 0}));
}

TEST(SubspaceKernelsTest, StartsAreTheDirectionsFoundAndTheHostsRandomOnes) {
  constexpr int64_t kRows = 3, kCols = 700;
  const auto v = Random<double>(kRows * kCols, 5);
  const std::vector<double> sigma{4, 2, 1e-9};
  std::vector<float> next(static_cast<size_t>(kRows * kCols));
  cuda::Emulate<cuda::NextStartKernel>({v.data(), sigma.data(), kZeroNorm<float>, kRows, kCols,
                                        kRefillSeed, RandomScale(kCols), next.data()});
  std::vector<float> random(static_cast<size_t>(kCols));
  RandomStart<float>(kRefillSeed + 2, ViewOf(random.data(), 1, kCols));
  for (size_t i = 0; i < kCols; ++i) {
    ASSERT_EQ(next[i], static_cast<float>(v[i] / 4));
    ASSERT_EQ(next[kCols + i], static_cast<float>(v[kCols + i] / 2));
    ASSERT_EQ(next[2 * kCols + i], random[i]);
  }
}

TEST(SubspaceKernelsTest, RowsAreWidenedToTheirPlaceAmongOthers) {
  const auto from = Random<float>(5 * 700, 8);
  std::vector<double> to(5 * 900, -1);
  int not_finite = 0;
  cuda::Emulate<cuda::WidenRowsKernel>(
      {from.data(), 5, 700, 0.3f, to.data() + 100, 900, &not_finite});
  cuda::Emulate<cuda::WidenRowsKernel>({nullptr, 5, 1, 1.0f, to.data() + 850, 900, &not_finite});
  for (size_t i = 0; i < 5; ++i) {
    for (size_t j = 0; j < 900; ++j) {
      const double wanted = j == 850             ? 1.0
                            : j < 100 || j > 799 ? -1.0
                                                 : double{from[i * 700 + j - 100] * 0.3f};
      ASSERT_EQ(to[i * 900 + j], wanted) << i << ", " << j;
    }
  }
  EXPECT_EQ(not_finite, 0);
  const float bad = 3e38f;
  cuda::Emulate<cuda::WidenRowsKernel>({&bad, 1, 1, 2.0f, to.data(), 1, &not_finite});
  EXPECT_EQ(not_finite, 1);
}

TEST(SubspaceKernelsTest, RowsThatAreNotKeptBecomeZeros) {
  const auto from = Random<double>(3 * 700, 6);
  std::vector<float> to(from.size(), -1);
  const int kept = 2;
  cuda::Emulate<cuda::NarrowRowsKernel>({from.data(), 3, 700, &kept, to.data()});
  for (size_t i = 0; i < to.size(); ++i) {
    ASSERT_EQ(to[i], i < 1400 ? static_cast<float>(from[i]) : 0.0f);
  }
  cuda::Emulate<cuda::NarrowRowsKernel>({from.data(), 3, 700, nullptr, to.data()});
  EXPECT_EQ(to.back(), static_cast<float>(from.back()));
}

// Against the host's encoder, bytes and what is decoded of them.
TEST(SubspaceKernelsTest, FactorsAreEncodedAsOnTheHost) {
  for (const int64_t cols : {1, 2, 255, 256, 257, 1000}) {
    auto x = Random<float>(4 * cols, static_cast<uint32_t>(cols));
    std::fill_n(x.begin() + cols, cols, 0.0f);                     // scale 0
    for (int64_t j = 0; j < cols; ++j) x[2 * cols + j] *= 1e-40f;  // too small for a scale
    for (const Wire wire : {Wire::kInt8, Wire::kBf16}) {
      std::vector<std::byte> wanted(EncodedBytes(wire, 4, cols, DType::kFloat32));
      std::vector<float> decoded(x.size());
      EncodeFactors<float>(wire, ViewOf<const float>(x.data(), 4, cols), wanted,
                           ViewOf(decoded.data(), 4, cols));
      std::vector<std::byte> bytes(wanted.size());
      std::vector<float> mine = x;
      if (wire == Wire::kInt8) {
        auto* out = reinterpret_cast<uint8_t*>(bytes.data());
        cuda::Emulate<cuda::QuantiseInt8RowsKernel>({mine.data(), 4, cols, out, mine.data()});
      } else {
        auto* out = reinterpret_cast<cuda::BFloat16*>(bytes.data());
        cuda::Emulate<cuda::RoundBf16Kernel>({mine.data(), 4 * cols, out, mine.data()});
      }
      EXPECT_TRUE(bytes == wanted) << Name(wire) << " " << cols;
      EXPECT_EQ(std::memcmp(mine.data(), decoded.data(), mine.size() * sizeof(float)), 0);
    }
  }
}

// ---- all of it

class SubspaceTest : public testing::Test {
 protected:
  void SetUp() override {
    fake_gpu::Reset();
    setenv("DAD_CUDART_LIBRARY", DAD_FAKE_GPU, 1);
    const Result<std::shared_ptr<DeviceBench>> bench =
        DeviceBench::Find(0, {DAD_FAKE_KERNELS, DAD_FAKE_GPU});
    ASSERT_TRUE(bench.ok()) << bench.status().ToString();
    bench_ = bench.value();
    ASSERT_TRUE(bench_->Open().ok());
  }
  void TearDown() override {
    bench_ = nullptr;
    unsetenv("DAD_CUDART_LIBRARY");
    EXPECT_EQ(fake_gpu::LiveBlocks(), 0);
    fake_gpu::Reset();
  }

  // Against the host's iteration from the same start.
  void Compare(const std::vector<float>& e, int64_t m, int64_t n, bool bias,
               const LowRankOptions& options, int passes) {
    const int64_t columns = n + (bias ? 1 : 0);
    const int64_t r = options.rank;
    std::vector<float> v(static_cast<size_t>(r * columns));
    RandomStart<float>(11, ViewOf(v.data(), r, columns));
    std::vector<float> warm = v, ut(static_cast<size_t>(r * m)), vt(v.size());
    int kept = -1;
    {
      DeviceSubspace subspace(*bench_, {e.data(), bias ? e.data() + m * n : nullptr, m, n},
                              options);
      ASSERT_TRUE(subspace.Open().ok());
      for (int pass = 0; pass < passes; ++pass) ASSERT_TRUE(subspace.Pass(v.data()).ok());
      ASSERT_TRUE(subspace.Factors(ut.data(), vt.data()).ok());
      ASSERT_TRUE(bench_->Copy(&kept, subspace.kept(), sizeof kept).ok());
    }
    // The host's: P = E V, Q = Eᵀ P.
    Factors<float> wanted;
    const auto at = [&](int64_t o, int64_t i) {
      return double{i < n ? e[static_cast<size_t>(o * n + i)] : e[static_cast<size_t>(m * n + o)]};
    };
    double total = 0;
    for (const float x : e) total += double{x} * x;
    for (int pass = 0; pass < passes; ++pass) {
      std::vector<float> p(static_cast<size_t>(r * m)), q(v.size());
      for (int64_t k = 0; k < r; ++k) {
        for (int64_t o = 0; o < m; ++o) {
          double sum = 0;
          for (int64_t i = 0; i < columns; ++i) sum += at(o, i) * warm[k * columns + i];
          p[static_cast<size_t>(k * m + o)] = static_cast<float>(sum);
        }
        for (int64_t i = 0; i < columns; ++i) {
          double sum = 0;
          for (int64_t o = 0; o < m; ++o) sum += at(o, i) * p[static_cast<size_t>(k * m + o)];
          q[static_cast<size_t>(k * columns + i)] = static_cast<float>(sum);
        }
      }
      wanted = FinishSubspace<float>(CpuLevel::kBaseline, ViewOf<const float>(p.data(), r, m),
                                     ViewOf<const float>(q.data(), r, columns), options, total,
                                     ViewOf(warm.data(), r, columns));
    }
    ASSERT_EQ(kept, wanted.rank);
    // Directions have a sign of their own: their product has not.
    for (int64_t o = 0; o < m; ++o) {
      for (int64_t i = 0; i < columns; ++i) {
        double mine = 0, hosts = 0;
        for (int64_t k = 0; k < r; ++k) mine += double{ut[k * m + o]} * vt[k * columns + i];
        for (int64_t k = 0; k < kept; ++k) {
          hosts += double{wanted.ut[k * m + o]} * wanted.vt[k * columns + i];
        }
        ASSERT_NEAR(mine, hosts, 2e-5 * std::sqrt(total)) << o << ", " << i;
      }
    }
  }

  std::shared_ptr<DeviceBench> bench_;
};

// Each launch would end the engine.
TEST_F(SubspaceTest, KernelsThatNeedANewerDriverAreLeftAlone) {
  setenv("DAD_FAKE_OLD_DRIVER", "1", 1);
  const Status status = DeviceBench::Find(0, {DAD_FAKE_KERNELS, DAD_FAKE_GPU}).status();
  unsetenv("DAD_FAKE_OLD_DRIVER");
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("CUDA 13.0, do not run: CUDA error 35"), std::string::npos)
      << status.message();
}

TEST_F(SubspaceTest, IsTheHostsIterationToRounding) {
  for (const bool bias : {false, true}) {
    for (const auto& [m, n, rank] :
         {std::tuple(40, 23, 3), std::tuple(9, 70, 5), std::tuple(3, 4, 6), std::tuple(1, 1, 1)}) {
      SCOPED_TRACE(std::to_string(m) + "x" + std::to_string(n) + (bias ? ":bias" : ""));
      const auto noise = Random<float>(m * (n + 1), 21);
      std::vector<float> e(static_cast<size_t>(m * (n + (bias ? 1 : 0))));
      // Singular values that fall fast, so that the iteration has converged.
      const auto u = Random<float>(8 * m, 22), v = Random<float>(8 * (n + 1), 23);
      for (size_t i = 0; i < e.size(); ++i) {
        e[i] = 1e-4f * noise[i];
        const auto o = static_cast<int64_t>(i) < m * n ? i / static_cast<size_t>(n) : i % m;
        const auto c = static_cast<int64_t>(i) < m * n ? i % static_cast<size_t>(n) : n;
        for (size_t k = 0; k < 8; ++k) {
          e[i] += std::pow(0.2f, static_cast<float>(k)) * u[k * m + o] * v[k * (n + 1) + c];
        }
      }
      LowRankOptions options;
      options.rank = rank;
      Compare(e, m, n, bias, options, 8);
      options.energy = 0.98;
      Compare(e, m, n, bias, options, 8);
      options.energy = 0;
      options.tol = 0.1;
      Compare(e, m, n, bias, options, 8);
    }
  }
}

TEST_F(SubspaceTest, WhatIsZeroHasNoDirectionsAndWhatOverflowsNeither) {
  LowRankOptions options;
  options.rank = 2;
  for (const float x : {0.0f, 3e38f}) {
    const std::vector<float> e(64 * 64, x);
    std::vector<float> v(2 * 64, 1.0f), ut(2 * 64, 7.0f), vt = ut;
    int kept = -1;
    DeviceSubspace subspace(*bench_, {e.data(), nullptr, 64, 64}, options);
    ASSERT_TRUE(subspace.Open().ok());
    ASSERT_TRUE(subspace.Pass(v.data()).ok());
    ASSERT_TRUE(subspace.Factors(ut.data(), vt.data()).ok());
    ASSERT_TRUE(bench_->Copy(&kept, subspace.kept(), sizeof kept).ok());
    EXPECT_EQ(kept, 0) << x;
    EXPECT_EQ(ut, std::vector<float>(2 * 64));
    EXPECT_EQ(vt, std::vector<float>(2 * 64));
    for (const float start : v) EXPECT_TRUE(std::isfinite(start));  // random again
  }
}

}  // namespace
}  // namespace dad
