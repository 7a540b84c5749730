// A tensor as the core sees it: a pointer with a shape and a type. Owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dad/export.h"

namespace dad {

enum class DType : uint8_t {
  kUint8 = 0,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kUint16,
};
inline constexpr int kNumDTypes = 11;

DAD_EXPORT size_t SizeOf(DType dtype);
DAD_EXPORT const char* Name(DType dtype);  // "float32"
DAD_EXPORT bool IsFloating(DType dtype);

// Where the bytes live. The tensors of a request are all on the host or all on one device.
enum class DeviceType : uint8_t { kCpu = 0, kCuda };

using Shape = std::vector<int64_t>;
DAD_EXPORT const char* Name(DeviceType device);       // "the host"
DAD_EXPORT std::string ToString(const Shape& shape);  // "[10,4]"
DAD_EXPORT int64_t NumElements(const Shape& shape);

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Shape shape;
  DeviceType device = DeviceType::kCpu;
  int device_index = -1;
  // Device tensors: a cudaEvent_t, work on `data` may start after it; the request keeps it alive.
  void* ready_event = nullptr;

  int64_t num_elements() const { return NumElements(shape); }
  size_t num_bytes() const { return static_cast<size_t>(num_elements()) * SizeOf(dtype); }
  std::byte* bytes() const { return static_cast<std::byte*>(data); }
};

}  // namespace dad
