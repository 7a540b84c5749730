// Writing and reading the parts of a share that methods with factors send: small numbers,
// and blocks of values in the type they were captured in, packed without loss.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "dad/status.h"
#include "dad/tensor_view.h"
#include "util/aligned_buffer.h"
#include "util/byte_io.h"
#include "util/gather_buffer.h"

namespace dad {

// Collects one share, to be sent to several peers.
class ShareWriter {
 public:
  // pack: what is left when zeros are taken out is packed, too (codec/float_pack.h), which pays
  // where the line is slow. Each block says how it came, so ranks need not agree.
  explicit ShareWriter(bool pack) : pack_(pack) {}
  ByteWriter& numbers() { return numbers_; }

  //   u8 dtype | varint bytes | a packing of zero_mask.h, or 2 and one of float_pack.h
  // Large blocks that do not get smaller are referenced: the values must stay as they are until
  // the step is over.
  void Block(const TensorView& values);
  void Bytes(std::vector<std::byte> bytes);

  // References everything: this must outlive the step.
  void AppendTo(GatherBuffer& out);
  size_t size() const { return size_; }

 private:
  void EndNumbers();
  void Reference(ByteSpan bytes);
  // False, and nothing was written, unless it comes to fewer bytes than that.
  bool PackedBlock(const TensorView& values, size_t less_than);

  bool pack_;
  ByteWriter numbers_;
  std::deque<std::vector<std::byte>> owned_;
  std::deque<AlignedBuffer> packed_;
  std::vector<ByteSpan> pieces_;
  size_t size_ = 0;
};

// A block in somebody's share.
struct BlockView {
  DType dtype = DType::kFloat32;
  ByteSpan packed;
};

// A block of `count` floating values. Not ok() when it is none; never larger than what its
// bytes can hold, so that a bad share cannot make us allocate.
BlockView ReadBlock(ByteReader& in, int64_t count);

// T is float or double.
template <typename T>
Status DecodeBlock(const BlockView& block, int64_t count, T* out);

// `count` values of any floating type.
template <typename T>
void ConvertTo(const TensorView& values, T* out);
template <typename T>
void ConvertFrom(const T* values, const TensorView& out);

}  // namespace dad
