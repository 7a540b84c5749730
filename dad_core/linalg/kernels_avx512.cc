// The kernels at this level. CMake gives this file, and no other, the level's flags; nothing
// here runs on a machine of a lower level.
#include "linalg/kernels.h"

#if defined(__AVX512F__)

#define Eigen EigenAtAvx512
#include "linalg/kernels_impl.h"

namespace dad::linalg {

const Kernels<float>* Avx512FloatKernels() { return Table<float>(); }
const Kernels<double>* Avx512DoubleKernels() { return Table<double>(); }

}  // namespace dad::linalg

#else

namespace dad::linalg {

const Kernels<float>* Avx512FloatKernels() { return nullptr; }
const Kernels<double>* Avx512DoubleKernels() { return nullptr; }

}  // namespace dad::linalg

#endif
