#include "codec/int_quantise.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "codec/int_run.h"

namespace dad {
namespace {

constexpr int kLimit = 127;

int64_t NumBuckets(int64_t count, int64_t bucket) {
  return count / bucket + (count % bucket != 0 ? 1 : 0);
}

// Calls visit(scale's bytes, integers, first element, elements) per bucket.
template <typename Byte, typename Visit>
void ForEachBucket(Byte* bytes, int64_t count, int64_t bucket, const Visit& visit) {
  const int64_t num = NumBuckets(count, bucket);
  Byte* ints = bytes + num * static_cast<int64_t>(sizeof(float));
  for (int64_t b = 0; b < num; ++b) {
    const int64_t begin = b * bucket;
    visit(bytes + b * static_cast<int64_t>(sizeof(float)), ints + begin, begin,
          std::min(bucket, count - begin));
  }
}

template <typename T>
Status Decode(std::span<const std::byte> bytes, int64_t count, int64_t bucket, bool add, T* x) {
  DAD_RETURN_IF_ERROR(CheckInt8(bytes, count, bucket));
  ForEachBucket(bytes.data(), count, bucket,
                [&](const std::byte* at, const std::byte* ints, int64_t begin, int64_t n) {
                  float scale;
                  std::memcpy(&scale, at, sizeof scale);
                  IntsToRun(reinterpret_cast<const int8_t*>(ints), n, scale, add, x + begin);
                });
  return Status::Ok();
}

}  // namespace

size_t QuantisedBytes(int64_t count, int64_t bucket) {
  return static_cast<size_t>(count) +
         static_cast<size_t>(NumBuckets(count, bucket)) * sizeof(float);
}

Status CheckInt8(std::span<const std::byte> bytes, int64_t count, int64_t bucket) {
  if (count < 0 || bucket < 1 || bytes.size() != QuantisedBytes(count, bucket)) {
    return Status::InvalidArgument("int8: " + std::to_string(bytes.size()) + " bytes for " +
                                   std::to_string(count) + " elements in buckets of " +
                                   std::to_string(bucket));
  }
  bool good = true;
  const int64_t num = NumBuckets(count, bucket);
  for (int64_t b = 0; b < num; ++b) {
    float scale;
    std::memcpy(&scale, bytes.data() + b * static_cast<int64_t>(sizeof scale), sizeof scale);
    good = good && IsScale(scale);
  }
  const auto* ints =
      reinterpret_cast<const int8_t*>(bytes.data()) + num * static_cast<int64_t>(sizeof(float));
  good = good && IntsAreWithin(ints, count, kLimit);
  return good ? Status::Ok() : Status::InvalidArgument("int8: a scale or an element out of range");
}

template <typename T>
void QuantiseInt8(const T* x, int64_t count, int64_t bucket, std::span<std::byte> out, T* decoded) {
  ForEachBucket(out.data(), count, bucket,
                [&](std::byte* at, std::byte* bytes, int64_t begin, int64_t n) {
                  auto* ints = reinterpret_cast<int8_t*>(bytes);
                  const float scale = ScaleOfRun(x + begin, n, kLimit);
                  std::memcpy(at, &scale, sizeof scale);
                  RunToInts(x + begin, n, scale, kLimit, ints);
                  if (decoded != nullptr) IntsToRun(ints, n, scale, false, decoded + begin);
                });
}

template <typename T>
Status DequantiseInt8(std::span<const std::byte> bytes, int64_t count, int64_t bucket, T* x) {
  return Decode(bytes, count, bucket, false, x);
}

template <typename T>
Status AddDequantisedInt8(std::span<const std::byte> bytes, int64_t count, int64_t bucket, T* x) {
  return Decode(bytes, count, bucket, true, x);
}

#define DAD_INSTANTIATE(T)                                                             \
  template void QuantiseInt8<T>(const T*, int64_t, int64_t, std::span<std::byte>, T*); \
  template Status DequantiseInt8<T>(std::span<const std::byte>, int64_t, int64_t, T*); \
  template Status AddDequantisedInt8<T>(std::span<const std::byte>, int64_t, int64_t, T*)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
