// The fake cuBLAS: products in double, put on the fake's streams.
#include <algorithm>

#include "fake_gpu_state.h"

using dad::CudaStream;
using dad::fake_gpu::Fake;
using dad::fake_gpu::Note;
using dad::fake_gpu::Run;

struct dad::cublasContext {
  CudaStream stream = nullptr;
};

FAKE int cublasCreate_v2(dad::CublasHandle* handle) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cublasCreate");
  Fake().handles.insert(*handle = new dad::cublasContext);
  return 0;
}
FAKE int cublasGetProperty(int which, int* value) {
  *value = which == 0 ? 13 : 0;
  return 0;
}
FAKE int cublasDestroy_v2(dad::CublasHandle handle) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cublasDestroy");
  if (Fake().handles.erase(handle) == 0) return 1;
  delete handle;
  return 0;
}
FAKE int cublasSetStream_v2(dad::CublasHandle handle, CudaStream stream) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note("cublasSetStream", stream);
  handle->stream = stream;
  return 0;
}

namespace {

// Column-major, as cuBLAS has it.
template <typename T>
int Gemm(const char* call, dad::CublasHandle handle, int trans_a, int trans_b, int m, int n, int k,
         T alpha, const T* a, int lda, const T* b, int ldb, T beta, T* c, int ldc) {
  const std::lock_guard<std::mutex> lock(Fake().mutex);
  Note(call, handle->stream, nullptr, static_cast<size_t>(m) * static_cast<size_t>(n), trans_a,
       trans_b);
  if (lda < std::max(1, trans_a ? k : m) || ldb < std::max(1, trans_b ? n : k) || ldc < m) return 7;
  handle->stream->entries.push_back([=] {
    for (int j = 0; j < n; ++j) {
      for (int i = 0; i < m; ++i) {
        double sum = 0;
        for (int l = 0; l < k; ++l) {
          sum += double{trans_a ? a[l + i * lda] : a[i + l * lda]} *
                 double{trans_b ? b[j + l * ldb] : b[l + j * ldb]};
        }
        T& to = c[i + j * ldc];
        to = static_cast<T>(alpha * sum + (beta == T(0) ? 0.0 : beta * to));
      }
    }
    return true;
  });
  Run();
  return 0;
}

}  // namespace

FAKE int cublasSgemm_v2(dad::CublasHandle handle, int ta, int tb, int m, int n, int k,
                        const float* alpha, const float* a, int lda, const float* b, int ldb,
                        const float* beta, float* c, int ldc) {
  return Gemm("cublasSgemm", handle, ta, tb, m, n, k, *alpha, a, lda, b, ldb, *beta, c, ldc);
}
FAKE int cublasDgemm_v2(dad::CublasHandle handle, int ta, int tb, int m, int n, int k,
                        const double* alpha, const double* a, int lda, const double* b, int ldb,
                        const double* beta, double* c, int ldc) {
  return Gemm("cublasDgemm", handle, ta, tb, m, n, k, *alpha, a, lda, b, ldb, *beta, c, ldc);
}
