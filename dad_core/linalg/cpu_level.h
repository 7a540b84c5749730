// Which instructions the loops over elements may use, found out at run time: one
// binary serves all machines.
#pragma once

namespace dad {

enum class CpuLevel {
  kBaseline,  // what every machine of the architecture has
  kAvx2,      // AVX2 and F16C
};

// The best level of this machine.
CpuLevel BestCpuLevel();

}  // namespace dad
