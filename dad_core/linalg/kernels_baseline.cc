// The kernels for what every machine has.
#include "linalg/kernels.h"

#define Eigen EigenAtBaseline
#include "linalg/kernels_impl.h"

namespace dad::linalg {

const Kernels<float>* BaselineFloatKernels() { return Table<float>(); }
const Kernels<double>* BaselineDoubleKernels() { return Table<double>(); }

}  // namespace dad::linalg
