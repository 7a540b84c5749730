#include "linalg/cpu_level.h"

#include <string>

namespace dad {
namespace {

CpuLevel Detect() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
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
