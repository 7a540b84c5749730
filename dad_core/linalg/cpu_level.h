// Which instructions the loops over elements may use, found out at run time: one
// binary serves all machines.
#pragma once

#include <string_view>

#include "dad/status.h"

namespace dad {

// Each level has all that the ones before it have.
enum class CpuLevel {
  kBaseline,  // what every machine of the architecture has
  kAvx2,      // AVX2, FMA and F16C
  kAvx512,    // AVX-512 F, BW, DQ and VL
};
inline constexpr int kNumCpuLevels = 3;

// The best level of this machine.
CpuLevel BestCpuLevel();

const char* Name(CpuLevel level);  // "avx2"
Result<CpuLevel> ParseCpuLevel(std::string_view name);

}  // namespace dad
