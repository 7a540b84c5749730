// The kernels at this level. CMake gives this file, and no other, the level's flags; nothing
// here runs on a machine of a lower level.
#include "linalg/kernels.h"

#if defined(__AVX2__)

#define Eigen EigenAtAvx2
#include "linalg/kernels_impl.h"

namespace dad::linalg {

const Kernels<float>* Avx2FloatKernels() { return Table<float>(); }
const Kernels<double>* Avx2DoubleKernels() { return Table<double>(); }

}  // namespace dad::linalg

#else

namespace dad::linalg {

const Kernels<float>* Avx2FloatKernels() { return nullptr; }
const Kernels<double>* Avx2DoubleKernels() { return nullptr; }

}  // namespace dad::linalg

#endif
