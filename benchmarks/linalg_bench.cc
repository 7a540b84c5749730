// Times of linalg/ and codec/ on one core, as in docs/numerics.md.
//
//   cmake --build build --target dad_linalg_bench && build/benchmarks/dad_linalg_bench
//
// An optional argument caps the CPU level: baseline, avx2 or avx512.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "best_seconds.h"
#include "codec/factor_wire.h"
#include "codec/int_quantise.h"
#include "codec/zero_mask.h"
#include "linalg/kernels.h"
#include "linalg/low_rank.h"
#include "linalg/products.h"
#include "linalg/residual.h"

namespace dad {
namespace {

using Floats = std::vector<float>;

double BestMs(const std::function<void()>& run) { return 1e3 * BestSeconds(run); }

Floats Random(int64_t count, uint64_t seed) {
  Floats x(static_cast<size_t>(count));
  RandomStart(seed, ViewOf(x.data(), 1, count));
  return x;
}

MatrixView<const float> In(const Floats& x, int64_t rows) {
  const auto cols = static_cast<int64_t>(x.size()) / rows;
  return {x.data(), rows, cols, cols};
}
MatrixView<float> Out(Floats& x, int64_t rows) {
  const auto cols = static_cast<int64_t>(x.size()) / rows;
  return {x.data(), rows, cols, cols};
}

void Say(const char* what, double ms, double gflop, double gigabytes) {
  std::printf("%-58s %8.2f ms", what, ms);
  if (gflop > 0) std::printf("  %6.1f GFLOP/s", gflop / ms * 1e3);
  if (gigabytes > 0) std::printf("  %6.1f GB/s", gigabytes / ms * 1e3);
  std::printf("\n");
}

void Memory() {
  constexpr int64_t kCount = 16 << 20;
  Floats a = Random(kCount, 1), b = Random(kCount, 2);
  Floats c(a.size());
  const double bytes = 4.0 * kCount / 1e9;
  Say("memory: c = a + 3 b, 64 MB each", BestMs([&] {
        for (size_t i = 0; i < c.size(); ++i) c[i] = a[i] + 3 * b[i];
      }),
      0, 3 * bytes);
  Say("memory: a += 1, 64 MB", BestMs([&] {
        for (float& x : a) x += 1;
      }),
      0, 2 * bytes);
}

void Products(CpuLevel level) {
  const linalg::Kernels<float>& kernels = linalg::KernelsAt<float>(level);
  struct Size {
    int64_t m, n, k;
  };
  for (const auto& [m, n, k] : {Size{1024, 1024, 2048},
                                {1024, 1024, 512},
                                {1024, 1024, 256},
                                {1024, 1024, 128},
                                {4096, 4096, 32},
                                {4096, 4096, 4}}) {
    const Floats d = Random(k * m, 1), a = Random(k * n, 2);
    Floats c(static_cast<size_t>(m * n));
    const double gflop = 2e-9 * static_cast<double>(m) * static_cast<double>(n * k);
    char what[100];
    const auto say = [&](const char* name) {
      std::snprintf(what, sizeof what, "%s %ldx%ld, depth %ld", name, m, n, k);
      return what;
    };
    const double ours = BestMs([&] { AddOuter(level, 1, In(d, k), In(a, k), 1, Out(c, m)); });
    Say(say("c += dT a:"), ours, gflop, 0);
    const double fresh = BestMs([&] { AddOuter(level, 1, In(d, k), In(a, k), 0, Out(c, m)); });
    Say(say("c = dT a:"), fresh, gflop, 0);
    const double eigen =
        BestMs([&] { kernels.gemm_tn(1, d.data(), m, a.data(), n, c.data(), n, m, n, k); });
    Say(say("c += dT a, by Eigen:"), eigen, gflop, 0);
  }
  const int64_t rows = 2048, cols = 1024;
  const Floats a = Random(rows * cols, 1);
  for (const int64_t r : {4, 16}) {
    const Floats v = Random(r * cols, 2), vt = Random(r * cols, 3);
    Floats c(static_cast<size_t>(rows * r));
    const double gflop = 2e-9 * static_cast<double>(rows * cols * r);
    char what[100];
    std::snprintf(what, sizeof what, "skinny: a bT, 2048x1024 by %ld", r);
    Say(what, BestMs([&] { MultiplyTransposed(level, In(a, rows), In(v, r), Out(c, rows)); }),
        gflop, 0);
    std::snprintf(what, sizeof what, "skinny: a bT, 2048x1024 by %ld, by Eigen", r);
    Say(what, BestMs([&] {
          std::fill(c.begin(), c.end(), 0.0f);
          kernels.gemm_nt(1, a.data(), cols, v.data(), cols, c.data(), r, rows, r, cols);
        }),
        gflop, 0);
    std::snprintf(what, sizeof what, "skinny: a b, 2048x1024 by %ld", r);
    Say(what, BestMs([&] { Multiply(level, In(a, rows), In(vt, cols), Out(c, rows)); }), gflop, 0);
  }
}

// The residual's step at N rows and rank r: fused, and as separate products.
void Residual(CpuLevel level, int64_t m, int64_t n, int64_t count, int64_t r) {
  const linalg::Kernels<float>& kernels = linalg::KernelsAt<float>(level);
  Floats e = Random(m * n, 1), p(static_cast<size_t>(r * m)), q(static_cast<size_t>(r * n));
  const Floats d = Random(count * m, 2), a = Random(count * n, 3), ut = Random(r * m, 4),
               vt = Random(r * n, 5), v = Random(r * n, 6);
  const RowsTerm<float> rows{In(d, count), In(a, count), 1e-3f, 0};
  const FactorTerm<float> factors{In(ut, r), In(vt, r), -1e-3f};
  ResidualStep<float> step;
  step.e = Out(e, m);
  step.rows = {&rows, 1};
  step.factors = {&factors, 1};
  step.v_warm = In(v, r);
  step.p = Out(p, r);
  step.q = Out(q, r);
  const double elements = static_cast<double>(m) * static_cast<double>(n);
  const double gflop = 2e-9 * elements * static_cast<double>(count + 3 * r);
  const double gigabytes = 8e-9 * elements;
  char what[100];
  const auto say = [&](const char* name) {
    std::snprintf(what, sizeof what, "%s: E %ldx%ld, N %ld, r %ld", name, m, n, count, r);
    return what;
  };
  Say(say("residual, one pass"), BestMs([&] { RunResidualStep(level, step); }), gflop, gigabytes);
  Say(say("residual, Eigen, four passes"), BestMs([&] {
        kernels.gemm_tn(1e-3f, d.data(), m, a.data(), n, e.data(), n, m, n, count);
        kernels.gemm_tn(-1e-3f, ut.data(), m, vt.data(), n, e.data(), n, m, n, r);
        std::fill(p.begin(), p.end(), 0.0f);
        std::fill(q.begin(), q.end(), 0.0f);
        kernels.gemm_nt(1, v.data(), n, e.data(), n, p.data(), m, r, m, n);
        kernels.gemm_nn(1, p.data(), m, e.data(), n, q.data(), n, r, n, m);
      }),
      gflop, gigabytes);
  ResidualStep<float> bare = step;
  bare.rows = {};
  bare.factors = {};
  Say(say("residual, no terms (read only)"), BestMs([&] { RunResidualStep(level, bare); }), 0,
      gigabytes / 2);
  LowRankOptions options;
  options.rank = static_cast<int>(r);
  Floats next(q.size());
  Say(say("FinishSubspace"), BestMs([&] {
        FinishSubspace<float>(level, Out(p, r), Out(q, r), options, -1, Out(next, r));
      }),
      0, 0);
}

void LowRank(CpuLevel level) {
  for (const int64_t count : {32, 64, 128, 512}) {
    const int64_t m = 1024, n = 1024;
    const Floats d = Random(count * m, 2), a = Random(count * n, 3), v = Random(4 * n, 4);
    const RowsTerm<float> rows{In(d, count), In(a, count), 1, 0};
    for (const bool exact : {true, false}) {
      LowRankOptions options;
      options.exact_rows = exact ? 1 << 20 : 0;
      char what[100];
      std::snprintf(what, sizeof what, "LowRankOfRows 1024x1024, N %ld, r 4, %s", count,
                    exact ? "exact" : "one warm iteration");
      Say(what, BestMs([&] {
            LowRankOfRows<float>(level, {&rows, 1}, m, n, false, In(v, 4), options);
          }),
          0, 0);
    }
  }
}

void Codecs() {
  constexpr int64_t kCount = 4 << 20;
  Floats x = Random(kCount, 1), y(x.size());
  const double gigabytes = 4e-9 * kCount;
  for (int i = 0; i < kNumWires; ++i) {
    const auto wire = static_cast<Wire>(i);
    std::vector<std::byte> bytes(EncodedBytes(wire, 1024, kCount / 1024, DType::kFloat32));
    char what[100];
    std::snprintf(what, sizeof what, "%s: encode and round 16 MB of factors", Name(wire));
    Say(what, BestMs([&] { EncodeFactors<float>(wire, In(x, 1024), bytes, Out(y, 1024)); }), 0,
        gigabytes);
    std::snprintf(what, sizeof what, "%s: decode", Name(wire));
    Say(what, BestMs([&] { (void)DecodeFactors(wire, bytes, Out(y, 1024)); }), 0, gigabytes);
  }
  std::vector<std::byte> bytes(QuantisedBytes(kCount, 512));
  Say("int8 in buckets of 512: encode 16 MB",
      BestMs([&] { QuantiseInt8<float>(x.data(), kCount, 512, bytes); }), 0, gigabytes);
  Say("int8 in buckets of 512: decode",
      BestMs([&] { (void)DequantiseInt8(bytes, kCount, 512, y.data()); }), 0, gigabytes);
  Say("int8 in buckets of 512: add",
      BestMs([&] { (void)AddDequantisedInt8(bytes, kCount, 512, y.data()); }), 0, gigabytes);
  for (const int percent : {0, 50, 90}) {
    Floats relu = x;
    for (size_t i = 0; i < relu.size(); ++i) {
      const auto scrambled = static_cast<uint32_t>(i) * 2654435761u;
      if (static_cast<int>((scrambled >> 16) % 100) < percent) relu[i] = 0;
    }
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      const int64_t count = static_cast<int64_t>(16 << 20) / static_cast<int64_t>(SizeOf(dtype));
      std::vector<uint16_t> halves(dtype == DType::kFloat16 ? static_cast<size_t>(count) : 0);
      for (size_t i = 0; i < halves.size(); ++i) {
        halves[i] = relu[i % relu.size()] != 0 ? static_cast<uint16_t>(1 + i % 1000) : 0;
      }
      const void* from = halves.empty() ? static_cast<const void*>(relu.data()) : halves.data();
      std::vector<std::byte> packed(PackedBytes(from, count, dtype)), back(16 << 20);
      char what[100];
      std::snprintf(what, sizeof what, "zero mask, %s, %d%% zeros: count", Name(dtype), percent);
      Say(what, BestMs([&] { (void)PackedBytes(from, count, dtype); }), 0, gigabytes);
      std::snprintf(what, sizeof what, "zero mask, %s, %d%% zeros: pack", Name(dtype), percent);
      Say(what, BestMs([&] { PackZeros(from, count, dtype, packed); }), 0, gigabytes);
      std::snprintf(what, sizeof what, "zero mask, %s, %d%% zeros: unpack", Name(dtype), percent);
      Say(what, BestMs([&] { (void)UnpackZeros(packed, count, dtype, back.data()); }), 0,
          gigabytes);
    }
  }
}

int Main(int argc, char** argv) {
  CpuLevel level = BestCpuLevel();
  if (argc > 1) {
    const Result<CpuLevel> asked = ParseCpuLevel(argv[1]);
    if (!asked.ok()) {
      std::fprintf(stderr, "%s\n", asked.status().ToString().c_str());
      return 1;
    }
    level = std::min(level, asked.value());
  }
  std::printf("level %s, one thread, float32, best of several runs\n", Name(level));
  Memory();
  Products(level);
  Residual(level, 4096, 4096, 32, 4);
  Residual(level, 4096, 4096, 32, 16);
  Residual(level, 4096, 4096, 256, 4);
  Residual(level, 1024, 1024, 32, 4);
  Residual(level, 1024, 1024, 2048, 4);
  LowRank(level);
  Codecs();
  return 0;
}

}  // namespace
}  // namespace dad

int main(int argc, char** argv) { return dad::Main(argc, argv); }
