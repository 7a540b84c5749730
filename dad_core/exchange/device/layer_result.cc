#include "exchange/device/layer_result.h"

#include "exchange/device/transfer.h"

namespace dad {

Status WriteFactors(DeviceBench& bench, const LayerInput& layer, const LayerShape& shape,
                    const DeviceFactors& factors, float scale, bool nothing, DeviceArena& arena) {
  const int64_t m = shape.out, in = shape.in, columns = in + (shape.bias ? 1 : 0), k = factors.k;
  DeviceResult<float> weight, bias;
  DAD_RETURN_IF_ERROR(weight.Take(bench, layer.output, arena));
  if (shape.bias) DAD_RETURN_IF_ERROR(bias.Take(bench, layer.output_bias, arena));
  if (!nothing && k > 0) {
    const Result<DeviceProducts*> products = bench.Products();
    if (!products.ok()) return products.status();
    const CudaDeviceGuard guard(bench.cuda(), bench.device());
    const DeviceMatrix<const float> ut{factors.ut, k, m}, vt{factors.vt, k, in, columns};
    DAD_RETURN_IF_ERROR(products.value()->Multiply<float>(
        layer.transposed ? vt : ut, true, layer.transposed ? ut : vt, false,
        {weight.values(), layer.transposed ? in : m, layer.transposed ? m : in}, scale));
    if (shape.bias) {
      DAD_RETURN_IF_ERROR(products.value()->Multiply<float>(
          ut, true, {factors.vt + in, k, 1, columns}, false, {bias.values(), m, 1}, scale));
    }
  }
  DAD_RETURN_IF_ERROR(weight.Deliver(bench, 1, 1, nothing));
  return bias.Deliver(bench, 1, 1, nothing);
}

}  // namespace dad
