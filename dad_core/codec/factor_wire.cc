#include "codec/factor_wire.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "codec/int_run.h"
#include "util/half.h"

namespace dad {
namespace {

constexpr int64_t kChunk = 512;  // elements that int4 has as bytes at a time; even

int LimitOf(Wire wire) { return wire == Wire::kInt8 ? 127 : 7; }

size_t RowBytes(Wire wire, int64_t n, size_t value_bytes) {
  const auto count = static_cast<size_t>(n);
  switch (wire) {
    case Wire::kFp32: return count * value_bytes;
    case Wire::kBf16: return count * 2;
    case Wire::kInt8: return sizeof(float) + count;
    case Wire::kInt4: return sizeof(float) + (count + 1) / 2;
  }
  return 0;
}

void PackNibbles(const int8_t* in, int64_t count, std::byte* out) {
  for (int64_t i = 0; i + 1 < count; i += 2) {
    out[i / 2] = static_cast<std::byte>((in[i] & 15) | ((in[i + 1] & 15) << 4));
  }
  if (count % 2 != 0) out[count / 2] = static_cast<std::byte>(in[count - 1] & 15);
}

void UnpackNibbles(const std::byte* in, int64_t count, int8_t* out) {
  for (int64_t i = 0; i + 1 < count; i += 2) {
    const auto both = static_cast<int8_t>(in[i / 2]);
    out[i] = static_cast<int8_t>(static_cast<int8_t>(both << 4) >> 4);
    out[i + 1] = static_cast<int8_t>(both >> 4);
  }
  if (count % 2 != 0) {
    out[count - 1] =
        static_cast<int8_t>(static_cast<int8_t>(static_cast<int>(in[count / 2]) << 4) >> 4);
  }
}

template <typename T>
void EncodeBf16(const T* x, int64_t n, std::byte* out, T* decoded) {
  for (int64_t j = 0; j < n; ++j) {
    const uint16_t rounded = FloatToBFloat16(static_cast<float>(x[j]));
    std::memcpy(out + 2 * j, &rounded, sizeof rounded);
    if (decoded != nullptr) decoded[j] = static_cast<T>(BFloat16ToFloat(rounded));
  }
}

template <typename T>
void EncodeInts(Wire wire, const T* x, int64_t n, std::byte* out, T* decoded) {
  const int limit = LimitOf(wire);
  const float scale = ScaleOfRun(x, n, limit);
  std::memcpy(out, &scale, sizeof scale);
  out += sizeof scale;
  for (int64_t j = 0; j < n; j += kChunk) {
    const int64_t count = std::min(kChunk, n - j);
    int8_t ints[kChunk];
    RunToInts(x + j, count, scale, limit, ints);
    if (wire == Wire::kInt8) {
      std::memcpy(out + j, ints, static_cast<size_t>(count));
    } else {
      PackNibbles(ints, count, out + j / 2);
    }
    if (decoded != nullptr) IntsToRun(ints, count, scale, false, decoded + j);
  }
}

// False if malformed.
template <typename T>
bool DecodeInts(Wire wire, const std::byte* in, int64_t n, T* x) {
  const int limit = LimitOf(wire);
  float scale;
  std::memcpy(&scale, in, sizeof scale);
  in += sizeof scale;
  bool good = IsScale(scale);
  for (int64_t j = 0; j < n; j += kChunk) {
    const int64_t count = std::min(kChunk, n - j);
    int8_t ints[kChunk];
    if (wire == Wire::kInt8) {
      std::memcpy(ints, in + j, static_cast<size_t>(count));
    } else {
      UnpackNibbles(in + j / 2, count, ints);
    }
    good = good && IntsAreWithin(ints, count, limit);
    IntsToRun(ints, count, scale, false, x + j);
  }
  const bool half_empty = wire == Wire::kInt4 && n % 2 != 0;
  return good && (!half_empty || (in[n / 2] >> 4) == std::byte{0});
}

}  // namespace

const char* Name(Wire wire) {
  switch (wire) {
    case Wire::kFp32: return "fp32";
    case Wire::kBf16: return "bf16";
    case Wire::kInt8: return "int8";
    case Wire::kInt4: return "int4";
  }
  return "?";
}

Result<Wire> ParseWire(std::string_view name) {
  for (int i = 0; i < kNumWires; ++i) {
    const auto wire = static_cast<Wire>(i);
    if (name == Name(wire)) return wire;
  }
  return Status::InvalidArgument("wire format \"" + std::string(name) +
                                 "\": expected fp32, bf16, int8 or int4");
}

size_t EncodedBytes(Wire wire, int64_t k, int64_t n, DType dtype) {
  return static_cast<size_t>(k) *
         RowBytes(wire, n, dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
}

template <typename T>
void EncodeFactors(Wire wire, MatrixView<const T> x, std::span<std::byte> out,
                   std::type_identity_t<MatrixView<T>> decoded) {
  const size_t row_bytes = RowBytes(wire, x.cols, sizeof(T));
  for (int64_t k = 0; k < x.rows; ++k) {
    std::byte* to = out.data() + static_cast<size_t>(k) * row_bytes;
    T* copy = decoded.rows > 0 ? decoded.row(k) : nullptr;
    if (wire == Wire::kFp32) {
      if (x.cols > 0) std::memcpy(to, x.row(k), row_bytes);
      if (copy != nullptr && copy != x.row(k)) std::copy_n(x.row(k), x.cols, copy);
    } else if (wire == Wire::kBf16) {
      EncodeBf16(x.row(k), x.cols, to, copy);
    } else {
      EncodeInts(wire, x.row(k), x.cols, to, copy);
    }
  }
}

template <typename T>
Status DecodeFactors(Wire wire, std::span<const std::byte> bytes, MatrixView<T> x) {
  const size_t row_bytes = RowBytes(wire, x.cols, sizeof(T));
  if (bytes.size() != static_cast<size_t>(x.rows) * row_bytes) {
    return Status::InvalidArgument(
        std::string(Name(wire)) + " factors: " + std::to_string(bytes.size()) + " bytes for " +
        std::to_string(x.rows) + " directions of " + std::to_string(x.cols));
  }
  bool good = true;
  for (int64_t k = 0; k < x.rows; ++k) {
    const std::byte* from = bytes.data() + static_cast<size_t>(k) * row_bytes;
    if (wire == Wire::kFp32) {
      if (x.cols > 0) std::memcpy(x.row(k), from, row_bytes);
    } else if (wire == Wire::kBf16) {
      for (int64_t j = 0; j < x.cols; ++j) {
        uint16_t value;
        std::memcpy(&value, from + 2 * j, sizeof value);
        x.row(k)[j] = static_cast<T>(BFloat16ToFloat(value));
      }
    } else {
      good = DecodeInts(wire, from, x.cols, x.row(k)) && good;
    }
  }
  if (good) return Status::Ok();
  return Status::InvalidArgument(std::string(Name(wire)) +
                                 " factors: a scale or a value out of range");
}

#define DAD_INSTANTIATE(T)                                                                        \
  template void EncodeFactors<T>(Wire, MatrixView<const T>, std::span<std::byte>, MatrixView<T>); \
  template Status DecodeFactors<T>(Wire, std::span<const std::byte>, MatrixView<T>)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
