#include "exchange/device/sparse_moments.h"

#include <span>
#include <utility>
#include <vector>

#include "exchange/device/transfer.h"

namespace dad {
namespace {

// The sums that rows are added to.
template <typename T>
struct Moments {
  T* g;
  T* s;  // null without a variance
};

template <typename T>
Status AddSegment(DeviceBench& bench, const RowsSegment& segment, const LayerShape& shape,
                  bool weight, T scale, Moments<T> sums) {
  const int64_t rows = segment.a.shape[0];
  const int64_t out_count = segment.d.shape[1];
  if (rows == 0 || out_count == 0) return Status::Ok();
  const int64_t begin = out_count == shape.out ? 0 : segment.out_begin;
  const Result<DeviceProducts*> products = bench.Products();
  if (!products.ok()) return products.status();
  DeviceArena work;
  const auto d = ValuesOf<T>(bench, segment.d, work);
  if (!d.ok()) return d.status();
  // A, or ones in its place.
  const int64_t cols = weight ? shape.in : 1;
  const T* a = nullptr;
  if (weight) {
    const auto values = ValuesOf<T>(bench, segment.a, work);
    if (!values.ok()) return values.status();
    a = values.value();
  } else {
    auto* ones = work.Take<T>(bench, rows);
    DAD_RETURN_IF_ERROR(work.status());
    const std::vector<T> host(static_cast<size_t>(rows), T(1));
    DAD_RETURN_IF_ERROR(Upload(bench, std::as_bytes(std::span(host)), ones));
    a = ones;
  }
  const auto add = [&](const T* left, const T* right, T factor, T* to) -> Status {
    const CudaDeviceGuard guard(bench.cuda(), bench.device());
    return products.value()->template Multiply<T>(
        {left, rows, out_count}, true, {right, rows, cols}, false,
        {to + begin * cols, out_count, cols}, factor, T(1));
  };
  DAD_RETURN_IF_ERROR(add(d.value(), a, scale, sums.g));
  if (sums.s == nullptr) return Status::Ok();
  auto* d_squares = work.Take<T>(bench, rows * out_count);
  auto* a_squares = work.Take<T>(bench, rows * cols);
  DAD_RETURN_IF_ERROR(work.status());
  DAD_RETURN_IF_ERROR(
      bench.Run<cuda::SquareKernel<T>>({d.value(), rows * out_count, scale, d_squares}));
  DAD_RETURN_IF_ERROR(bench.Run<cuda::SquareKernel<T>>({a, rows * cols, T(1), a_squares}));
  return add(d_squares, a_squares, T(1), sums.s);
}

}  // namespace

template <typename T>
Status AddRowMoments(DeviceBench& bench, const LayerInput& layer, const LayerShape& shape,
                     bool weight, SparseTensor<T>& tensor, DeviceArena& arena) {
  const bool variance = tensor.v != nullptr;
  const T scale = std::exchange(tensor.scale, T(1));
  auto* g = arena.Take<T>(bench, tensor.count);
  auto* s = variance ? arena.Take<T>(bench, tensor.count) : nullptr;
  DAD_RETURN_IF_ERROR(arena.status());
  DAD_RETURN_IF_ERROR(
      bench.Run<cuda::AddKeptKernel<T>>({tensor.g, tensor.count, scale, nullptr, g, nullptr}));
  if (variance && tensor.s != nullptr) {
    DAD_RETURN_IF_ERROR(bench.Run<cuda::AddKeptKernel<T>>(
        {tensor.s, tensor.count, scale * scale, nullptr, s, nullptr}));
  } else if (variance) {
    DAD_RETURN_IF_ERROR(bench.Run<cuda::SquareKernel<T>>({tensor.g, tensor.count, scale, s}));
  }
  tensor.g = g;
  tensor.s = s;
  for (const RowsSegment& segment : layer.rows) {
    DAD_RETURN_IF_ERROR(AddSegment<T>(bench, segment, shape, weight, scale, {g, s}));
  }
  return Status::Ok();
}

#define DAD_INSTANTIATE(T)                                                                   \
  template Status AddRowMoments<T>(DeviceBench&, const LayerInput&, const LayerShape&, bool, \
                                   SparseTensor<T>&, DeviceArena&)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
