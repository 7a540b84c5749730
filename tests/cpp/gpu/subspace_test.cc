// Products and subspace iteration: the calls and their sizes on the recording fake of cuBLAS, which
// computes on the host, and the small kernels emulated. No GPU has run any of it.
#include "device/subspace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include "codec/cuda/small_kernels.h"
#include "device/events.h"
#include "emulate.h"
#include "fake_gpu.h"

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

// On the stream it would run later; the fake's streams in these tests are never held.
template <template <typename> class Kernel, typename T>
int Emulated(const void* args, void*) {
  cuda::Emulate<Kernel<T>>(*static_cast<const typename Kernel<T>::Args*>(args));
  return 0;
}
template <typename T>
SmallKernels EmulatedKernels() {
  return {&Emulated<cuda::OrthonormaliseKernel, T>, &Emulated<cuda::SmallSvdKernel, T>};
}

class SubspaceTest : public testing::Test {
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

TEST_F(SubspaceTest, CublasThatIsNotThereIsSaid) {
  const Status status = LoadCublas("/nowhere/libcublas.so").status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("cuBLAS"), std::string::npos) << status.message();
}

TEST_F(SubspaceTest, ProductsAreRowMajorOnTheStream) {
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

template <typename T>
class SubspaceOf : public SubspaceTest {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(SubspaceOf, Types);

TYPED_TEST(SubspaceOf, FindsAMatrixOfLowRankWithItsSingularValues) {
  using T = TypeParam;
  constexpr int64_t kM = 40, kN = 23, kR = 3;
  // U diag(9, 4, 1) Vᵀ with orthonormal columns, made by the host's own Gram-Schmidt.
  const auto basis = [](int64_t rows, uint32_t seed) {
    std::vector<double> y = Random<double>(rows * kR, seed);
    for (int64_t j = 0; j < kR; ++j) {
      for (int64_t k = 0; k <= j; ++k) {
        double dot = 0;
        for (int64_t i = 0; i < rows; ++i) dot += y[i * kR + j] * y[i * kR + k];
        for (int64_t i = 0; i < rows; ++i) {
          if (k < j) {
            y[i * kR + j] -= dot * y[i * kR + k];
          } else {
            y[i * kR + j] /= std::sqrt(dot);
          }
        }
      }
    }
    return y;
  };
  const auto u = basis(kM, 3);
  const auto v = basis(kN, 4);
  const double values[] = {9, 4, 1};
  std::vector<T> e(kM * kN);
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t j = 0; j < kN; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < kR; ++k) sum += u[i * kR + k] * values[k] * v[j * kR + k];
      e[static_cast<size_t>(i * kN + j)] = static_cast<T>(sum);
    }
  }
  std::vector<T> q = Random<T>(kN * kR, 5);
  std::vector<T> p(kM * kR);
  std::vector<T> s(kR);
  std::vector<std::byte> workspace(SubspaceBytes<T>(kM, kN, kR));
  Result<DeviceProducts> products = DeviceProducts::Make(this->cublas_, this->stream_);
  ASSERT_TRUE(products.ok());
  SubspaceStep<T> step{
      {e.data(), kM, kN}, {q.data(), kN, kR}, {p.data(), kM, kR}, s.data(), workspace.data()};
  ASSERT_TRUE(
      IterateSubspace(this->cuda_, products.value(), EmulatedKernels<T>(), this->stream_, step)
          .ok());
  const double near = sizeof(T) == 4 ? 1e-4 : 1e-10;
  for (int64_t k = 0; k < kR; ++k) EXPECT_NEAR(s[static_cast<size_t>(k)], values[k], near);
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t j = 0; j < kN; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < kR; ++k) sum += double{p[i * kR + k]} * double{q[j * kR + k]};
      ASSERT_NEAR(sum, e[static_cast<size_t>(i * kN + j)], near);
    }
  }
  for (int64_t a = 0; a < kR; ++a) {
    for (int64_t b = 0; b < kR; ++b) {
      double dot = 0;
      for (int64_t i = 0; i < kM; ++i) dot += double{p[i * kR + a]} * double{p[i * kR + b]};
      EXPECT_NEAR(dot, a == b ? 1 : 0, near);
    }
  }
}

TYPED_TEST(SubspaceOf, RanksBeyondTheMatrixGiveZerosNotNoise) {
  using T = TypeParam;
  constexpr int64_t kM = 12, kN = 9, kR = 4;
  std::vector<T> e(kM * kN);  // of rank 1
  for (int64_t i = 0; i < kM * kN; ++i) e[static_cast<size_t>(i)] = T(1 + i / kN);
  std::vector<T> q = Random<T>(kN * kR, 6);
  std::vector<T> p(kM * kR), s(kR);
  std::vector<std::byte> workspace(SubspaceBytes<T>(kM, kN, kR));
  Result<DeviceProducts> products = DeviceProducts::Make(this->cublas_, this->stream_);
  ASSERT_TRUE(products.ok());
  const SubspaceStep<T> step{
      {e.data(), kM, kN}, {q.data(), kN, kR}, {p.data(), kM, kR}, s.data(), workspace.data()};
  ASSERT_TRUE(
      IterateSubspace(this->cuda_, products.value(), EmulatedKernels<T>(), this->stream_, step)
          .ok());
  EXPECT_NEAR(s[0], std::sqrt(650.0 * 9), 1e-2);
  for (size_t k = 1; k < kR; ++k) EXPECT_NEAR(s[k], 0, 1e-2);
  for (const T x : p) EXPECT_TRUE(std::isfinite(x));
}

TEST(SmallMatrixTest, SquareRootsAreThoseOfTheLibraryToTheLastBits) {
  for (const double x : {1e-300, 1e-20, 0.5, 1.0, 2.0, 3.0, 1e10, 1e200}) {
    EXPECT_NEAR(cuda::SquareRoot(x) / std::sqrt(x), 1, 1e-15) << x;
  }
  EXPECT_EQ(cuda::SquareRoot(0), 0);
  EXPECT_EQ(cuda::SquareRoot(-1), 0);
}

TEST(SmallMatrixTest, SizesAroundTheWarp) {
  for (const int n : {1, 2, 5, 31, 32, 33, 64}) {
    const auto y = Random<double>(int64_t{80} * n, static_cast<uint32_t>(n));
    std::vector<double> gram(static_cast<size_t>(n * n));
    for (int a = 0; a < n; ++a) {
      for (int b = 0; b < n; ++b) {
        for (int i = 0; i < 80; ++i) gram[a * n + b] += y[i * n + a] * y[i * n + b];
      }
    }
    std::vector<double> g = gram, v(gram.size()), s(static_cast<size_t>(n));
    cuda::SmallSvd(n, g.data(), v.data(), s.data());
    for (int a = 0; a < n; ++a) {
      EXPECT_LE(s[a], s[std::max(a - 1, 0)]);
      for (int b = 0; b < n; ++b) {
        double sum = 0;
        for (int k = 0; k < n; ++k) sum += v[a * n + k] * s[k] * s[k] * v[b * n + k];
        EXPECT_NEAR(sum, gram[a * n + b], 1e-9 * (1 + std::abs(gram[a * n + b])) * 100);
      }
    }
  }
}

// device/subspace.cc has its own declarations of the arguments.
TEST(SmallMatrixTest, ArgumentsAreAsTheKernelsHaveThem) {
  using Orthonormalise = cuda::OrthonormaliseKernel<float>::Args;
  EXPECT_EQ(sizeof(Orthonormalise), 40u);
  EXPECT_EQ(offsetof(Orthonormalise, factor), 32u);
  using Svd = cuda::SmallSvdKernel<float>::Args;
  EXPECT_EQ(sizeof(Svd), 40u);
  EXPECT_EQ(offsetof(Svd, s), 32u);
}

}  // namespace
}  // namespace dad
