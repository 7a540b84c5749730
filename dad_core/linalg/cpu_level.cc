#include "linalg/cpu_level.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <string>

namespace dad {
namespace {

#if defined(__x86_64__)
// Not every clang knows it by name.
bool HasF16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

CpuLevel Detect() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return CpuLevel::kAvx512;
  if (avx2) return CpuLevel::kAvx2;
#endif
  return CpuLevel::kBaseline;
}

}  // namespace

CpuLevel BestCpuLevel() {
  static const CpuLevel level = Detect();
  return level;
}

const char* Name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kBaseline: return "baseline";
    case CpuLevel::kAvx2: return "avx2";
    case CpuLevel::kAvx512: return "avx512";
  }
  return "?";
}

Result<CpuLevel> ParseCpuLevel(std::string_view name) {
  for (int i = 0; i < kNumCpuLevels; ++i) {
    const auto level = static_cast<CpuLevel>(i);
    if (name == Name(level)) return level;
  }
  return Status::InvalidArgument("CPU level \"" + std::string(name) +
                                 "\": expected baseline, avx2 or avx512");
}

}  // namespace dad
