// Compiled only where the headers of cuBLAS are: the functions and constants that cublas_api.h
// declares are the ones that the headers have. Makes no code.
#include <cublas_v2.h>

#include "device/cublas_api.h"
#include "device/same_call.h"

namespace dad {
namespace {

#define DAD_CHECK(symbol, name, parameters)                                            \
  static_assert(SameCall<decltype(CublasApi::name), decltype(&cublas##symbol)>::value, \
                "cublas" #symbol);
DAD_CUBLAS_FUNCTIONS(DAD_CHECK)
#undef DAD_CHECK

static_assert(kCublasSuccess == CUBLAS_STATUS_SUCCESS);
static_assert(CUBLAS_OP_N == 0 && CUBLAS_OP_T == 1);
static_assert(MAJOR_VERSION == 0 && MINOR_VERSION == 1 && PATCH_LEVEL == 2);

}  // namespace
}  // namespace dad
