#include "linalg/kernels.h"

namespace dad::linalg {

template <>
const Kernels<float>& KernelsAt<float>(CpuLevel level) {
  if (level == CpuLevel::kAvx512) return *Avx512FloatKernels();
  if (level == CpuLevel::kAvx2) return *Avx2FloatKernels();
  return *BaselineFloatKernels();
}

template <>
const Kernels<double>& KernelsAt<double>(CpuLevel level) {
  if (level == CpuLevel::kAvx512) return *Avx512DoubleKernels();
  if (level == CpuLevel::kAvx2) return *Avx2DoubleKernels();
  return *BaselineDoubleKernels();
}

}  // namespace dad::linalg
