#include "codec/qsgd.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "util/hash.h"

namespace dad {
namespace {

int64_t NumBuckets(int64_t count) { return (count + kQsgdBucket - 1) / kQsgdBucket; }

// The finaliser of SplitMix64.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// In [0, 1).
double Uniform(uint64_t key, int64_t element) {
  const uint64_t x = Mix(key + static_cast<uint64_t>(element) * 0x9E3779B97F4A7C15ull);
  return static_cast<double>(x >> 11) * 0x1p-53;
}

// The least float that is not below x; NaN if there is none or x is NaN.
float RoundUp(double x) {
  if (!(x <= static_cast<double>(std::numeric_limits<float>::max()))) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  const auto rounded = static_cast<float>(x);
  return static_cast<double>(rounded) < x
             ? std::nextafter(rounded, std::numeric_limits<float>::infinity())
             : rounded;
}

// Levels on each side of zero; 0 for one bit, which has none in the middle.
int Levels(int bits) { return (1 << (bits - 1)) - 1; }

int Quantise(double x, double scale, int bits, double u) {
  const int levels = Levels(bits);
  if (bits == 1)
    return scale == 0
               ? 0
               : std::clamp<int>(static_cast<int>(std::floor((x / scale + 1) / 2 + u)), 0, 1);
  if (scale == 0) return levels;
  const auto q = static_cast<int>(std::floor(levels * x / scale + u));
  return std::clamp(q, -levels, levels) + levels;
}

template <typename T>
T ValueOf(int code, float scale, int bits) {
  const double wide = static_cast<double>(scale);
  if (bits == 1) return static_cast<T>(code == 0 ? -wide : wide);
  const int levels = Levels(bits);
  return static_cast<T>(wide * (code - levels) / levels);
}

// Calls start(scale) for each bucket and visit(element, code) for each of its elements.
template <typename Start, typename Visit>
Status Decode(std::span<const std::byte> bytes, int64_t count, int bits, const Start& start,
              const Visit& visit) {
  if (bytes.size() != QsgdBytes(count, bits)) {
    return Status::InvalidArgument("expected " + std::to_string(QsgdBytes(count, bits)) +
                                   " bytes, got " + std::to_string(bytes.size()));
  }
  const std::byte* scales = bytes.data();
  const std::byte* codes = bytes.data() + NumBuckets(count) * static_cast<int64_t>(sizeof(float));
  const int most = bits == 1 ? 1 : 2 * Levels(bits);
  uint64_t pending = 0;
  int num_pending = 0;
  for (int64_t begin = 0; begin < count; begin += kQsgdBucket) {
    float scale;
    std::memcpy(&scale, scales, sizeof scale);
    scales += sizeof scale;
    if (!std::isfinite(scale) || scale < 0) return Status::InvalidArgument("a bad scale");
    start(scale);
    for (int64_t i = begin; i < std::min(begin + kQsgdBucket, count); ++i) {
      for (; num_pending < bits; num_pending += 8) {
        pending |= std::to_integer<uint64_t>(*codes++) << num_pending;
      }
      const auto code = static_cast<int>(pending & ((1u << bits) - 1));
      pending >>= bits;
      num_pending -= bits;
      if (code > most) return Status::InvalidArgument("a value has no meaning");
      visit(i, code);
    }
  }
  return pending == 0 ? Status::Ok() : Status::InvalidArgument("unused bits are not 0");
}

}  // namespace

size_t QsgdBytes(int64_t count, int bits) {
  return static_cast<size_t>(NumBuckets(count)) * sizeof(float) +
         static_cast<size_t>((count * bits + 7) / 8);
}

uint64_t QsgdKey(uint64_t seed, std::string_view name, int64_t step, int rank) {
  const uint64_t of_tensor = Mix(seed ^ HashCombine(kHashSeed, name));
  return Mix(Mix(of_tensor + static_cast<uint64_t>(step)) + static_cast<uint64_t>(rank));
}

template <typename T>
bool EncodeQsgd(const T* x, int64_t count, T factor, int bits, uint64_t key,
                std::span<std::byte> out) {
  std::byte* scales = out.data();
  std::byte* codes = out.data() + NumBuckets(count) * static_cast<int64_t>(sizeof(float));
  uint64_t pending = 0;  // bits that make no byte yet
  int num_pending = 0;
  for (int64_t begin = 0; begin < count; begin += kQsgdBucket) {
    const int64_t end = std::min(begin + kQsgdBucket, count);
    double largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      const double size = std::fabs(static_cast<double>(x[i] * factor));
      // A NaN stays: it is below nothing.
      largest = largest >= size ? largest : size;
      if (std::isnan(size)) return false;
    }
    const float scale = RoundUp(largest);
    if (!std::isfinite(scale)) return false;
    std::memcpy(scales, &scale, sizeof scale);
    scales += sizeof scale;
    for (int64_t i = begin; i < end; ++i) {
      const auto value = static_cast<double>(x[i] * factor);
      const int code = Quantise(value, static_cast<double>(scale), bits, Uniform(key, i));
      pending |= static_cast<uint64_t>(code) << num_pending;
      for (num_pending += bits; num_pending >= 8; num_pending -= 8, pending >>= 8) {
        *codes++ = static_cast<std::byte>(pending & 0xff);
      }
    }
  }
  if (num_pending > 0) *codes = static_cast<std::byte>(pending);
  return true;
}

Status CheckQsgd(std::span<const std::byte> bytes, int64_t count, int bits) {
  return Decode(
      bytes, count, bits, [](float) {}, [](int64_t, int) {});
}

template <typename T>
Status AddQsgd(std::span<const std::byte> bytes, int64_t count, int bits, T* sum) {
  const int most = bits == 1 ? 1 : 2 * Levels(bits);
  T values[256] = {};
  const auto start = [&](float scale) {
    for (int code = 0; code <= most; ++code) {
      values[code] = scale == 0 ? T(0) : ValueOf<T>(code, scale, bits);
    }
  };
  return Decode(bytes, count, bits, start, [&](int64_t i, int code) { sum[i] += values[code]; });
}

template bool EncodeQsgd<float>(const float*, int64_t, float, int, uint64_t, std::span<std::byte>);
template bool EncodeQsgd<double>(const double*, int64_t, double, int, uint64_t,
                                 std::span<std::byte>);
template Status AddQsgd<float>(std::span<const std::byte>, int64_t, int, float*);
template Status AddQsgd<double>(std::span<const std::byte>, int64_t, int, double*);

}  // namespace dad
