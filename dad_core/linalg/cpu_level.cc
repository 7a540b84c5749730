#include "linalg/cpu_level.h"

namespace dad {

CpuLevel BestCpuLevel() {
#if defined(__x86_64__)
  static const CpuLevel level = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")
                                    ? CpuLevel::kAvx2
                                    : CpuLevel::kBaseline;
  return level;
#else
  return CpuLevel::kBaseline;
#endif
}

}  // namespace dad
