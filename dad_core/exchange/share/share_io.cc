#include "exchange/share/share_io.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "codec/float_pack.h"
#include "codec/zero_mask.h"
#include "exchange/by_method.h"
#include "util/half.h"

namespace dad {
namespace {

// The form of a block, its first byte; those below it are of zero_mask.h.
constexpr std::byte kPackedFloats{2};
// For smaller blocks the time counts for more than the bytes.
constexpr int64_t kLeastPacked = 256;

Status Unpack(const BlockView& block, int64_t count, void* out) {
  if (block.packed.empty() || block.packed[0] != kPackedFloats) {
    return UnpackZeros(block.packed, count, block.dtype, out);
  }
  if (!CanPackFloats(block.dtype)) {
    return Status::InvalidArgument(std::string("packed values of type ") + Name(block.dtype));
  }
  return UnpackFloats(block.packed.subspan(1), count, block.dtype, out);
}

template <typename T>
void Widen(DType dtype, const void* from, int64_t count, T* out) {
  switch (dtype) {
    case DType::kFloat16: {
      const auto* in = static_cast<const uint16_t*>(from);
      std::transform(in, in + count, out,
                     [](uint16_t v) { return static_cast<T>(HalfToFloat(v)); });
      return;
    }
    case DType::kBFloat16: {
      const auto* in = static_cast<const uint16_t*>(from);
      std::transform(in, in + count, out,
                     [](uint16_t v) { return static_cast<T>(BFloat16ToFloat(v)); });
      return;
    }
    case DType::kFloat32: {
      const auto* in = static_cast<const float*>(from);
      std::transform(in, in + count, out, [](float v) { return static_cast<T>(v); });
      return;
    }
    default: {
      const auto* in = static_cast<const double*>(from);
      std::transform(in, in + count, out, [](double v) { return static_cast<T>(v); });
      return;
    }
  }
}

}  // namespace

void ShareWriter::Reference(ByteSpan bytes) {
  if (bytes.empty()) return;
  pieces_.push_back(bytes);
  size_ += bytes.size();
}

void ShareWriter::EndNumbers() {
  if (numbers_.bytes().empty()) return;
  owned_.push_back(std::exchange(numbers_, {}).bytes());
  Reference(owned_.back());
}

void ShareWriter::Bytes(std::vector<std::byte> bytes) {
  EndNumbers();
  if (bytes.empty()) return;
  owned_.push_back(std::move(bytes));
  Reference(owned_.back());
}

void ShareWriter::Block(const TensorView& values) {
  const int64_t count = values.num_elements();
  const size_t packed = PackedBytes(values.data, count, values.dtype);
  if (pack_ && PackedBlock(values, packed)) return;
  numbers_.Value(static_cast<uint8_t>(values.dtype));
  numbers_.Varint(packed);
  if (packed == 1 + values.num_bytes()) {
    numbers_.Value(uint8_t{0});  // the form "as they are"
    EndNumbers();
    Reference({values.bytes(), values.num_bytes()});
    return;
  }
  std::vector<std::byte> bytes(packed);
  PackZeros(values.data, count, values.dtype, bytes);
  Bytes(std::move(bytes));
}

bool ShareWriter::PackedBlock(const TensorView& values, size_t less_than) {
  const int64_t count = values.num_elements();
  if (!CanPackFloats(values.dtype) || count < kLeastPacked) return false;
  AlignedBuffer buffer(1 + PackFloatsRoom(count, values.dtype));
  const size_t packed = 1 + PackFloats(values.data, count, values.dtype, buffer.span().subspan(1));
  if (packed >= less_than) return false;
  buffer.data()[0] = kPackedFloats;
  numbers_.Value(static_cast<uint8_t>(values.dtype));
  numbers_.Varint(packed);
  EndNumbers();
  packed_.push_back(std::move(buffer));
  Reference(packed_.back().span().first(packed));
  return true;
}

void ShareWriter::AppendTo(GatherBuffer& out) {
  EndNumbers();
  for (ByteSpan piece : pieces_) out.Reference(piece.data(), piece.size());
}

BlockView ReadBlock(ByteReader& in, int64_t count) {
  BlockView block;
  const auto dtype = in.Value<uint8_t>();
  const uint64_t num_bytes = in.Varint();
  block.packed = in.Take(num_bytes);
  const bool floating = dtype < kNumDTypes && IsFloating(static_cast<DType>(dtype));
  // The least that a packing takes is a bit per element, and of packed floats a byte for 64.
  const bool packed = !block.packed.empty() && block.packed[0] == kPackedFloats;
  const uint64_t per_byte = packed ? 64 : 8;
  const bool holds = count >= 0 && static_cast<uint64_t>(count) <= per_byte * block.packed.size();
  if (!floating || !holds) in.Take(~uint64_t{0});  // not ok from here on
  block.dtype = floating ? static_cast<DType>(dtype) : DType::kFloat32;
  return block;
}

template <typename T>
Status DecodeBlock(const BlockView& block, int64_t count, T* out) {
  if (block.dtype == DTypeOf<T>()) return Unpack(block, count, out);
  std::vector<std::byte> values(static_cast<size_t>(count) * SizeOf(block.dtype));
  DAD_RETURN_IF_ERROR(Unpack(block, count, values.data()));
  Widen(block.dtype, values.data(), count, out);
  return Status::Ok();
}

template <typename T>
void ConvertTo(const TensorView& values, T* out) {
  if (values.dtype == DTypeOf<T>()) {
    if (values.num_bytes() > 0) std::memcpy(out, values.data, values.num_bytes());
  } else {
    Widen(values.dtype, values.data, values.num_elements(), out);
  }
}

template <typename T>
void ConvertFrom(const T* values, const TensorView& out) {
  const int64_t count = out.num_elements();
  if (out.dtype == DTypeOf<T>()) {
    if (count > 0) std::memcpy(out.data, values, out.num_bytes());
  } else if (out.dtype == DType::kFloat16) {
    std::transform(values, values + count, static_cast<uint16_t*>(out.data),
                   [](T v) { return FloatToHalf(static_cast<float>(v)); });
  } else if (out.dtype == DType::kBFloat16) {
    std::transform(values, values + count, static_cast<uint16_t*>(out.data),
                   [](T v) { return FloatToBFloat16(static_cast<float>(v)); });
  } else if (out.dtype == DType::kFloat32) {
    std::transform(values, values + count, static_cast<float*>(out.data),
                   [](T v) { return static_cast<float>(v); });
  } else {
    std::transform(values, values + count, static_cast<double*>(out.data),
                   [](T v) { return static_cast<double>(v); });
  }
}

template Status DecodeBlock(const BlockView&, int64_t, float*);
template Status DecodeBlock(const BlockView&, int64_t, double*);
template void ConvertTo(const TensorView&, float*);
template void ConvertTo(const TensorView&, double*);
template void ConvertFrom(const float*, const TensorView&);
template void ConvertFrom(const double*, const TensorView&);

}  // namespace dad
