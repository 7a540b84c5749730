#include "exchange/method/factor/factor_share.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "util/byte_io.h"

namespace dad {
namespace {

// Bits of a share's first byte.
constexpr uint8_t kReplan = 1;
constexpr uint8_t kScaled = 2;  // a double follows: the sender's weight
// Bits of a segment's first byte.
constexpr uint8_t kHasD = 1;
constexpr uint8_t kPart = 2;  // of the rows of W: where it begins and how many follow

template <typename T>
void WriteRows(const LayerShape& shape, const RowsSegment& segment, ShareWriter& out) {
  const bool has_d = segment.d.data != nullptr;
  const int64_t out_count = has_d ? segment.d.shape[1] : shape.out;
  const bool part = out_count != shape.out;
  out.numbers().Value(static_cast<uint8_t>((has_d ? kHasD : 0) | (part ? kPart : 0)));
  out.numbers().Varint(static_cast<uint64_t>(segment.a.shape[0]));
  if (part) {
    out.numbers().Varint(static_cast<uint64_t>(segment.out_begin));
    out.numbers().Varint(static_cast<uint64_t>(out_count));
  }
  if (shape.pass) {
    out.Bytes(PositiveBits<T>(segment.a));
  } else {
    out.Block(segment.a);
  }
  if (has_d) out.Block(segment.d);
}

void WriteIndexed(const IndexedSegment& segment, ShareWriter& out) {
  const auto count = static_cast<size_t>(segment.index.num_elements());
  const auto* index = static_cast<const int64_t*>(segment.index.data);
  out.numbers().Varint(count);
  std::vector<std::byte> bytes(count * sizeof(uint32_t));
  for (size_t i = 0; i < count; ++i) {
    const auto value = static_cast<uint32_t>(index[i]);
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
  out.Bytes(std::move(bytes));
  out.Block(segment.x);
}

void ParseRows(const LayerShape& shape, ByteReader& in, RowsPiece& piece) {
  // Rows without columns take no bytes, so a share could claim any number of them.
  constexpr uint64_t kMaxRows = uint64_t{1} << 31;
  const auto flags = in.Value<uint8_t>();
  const uint64_t rows = in.Varint();
  uint64_t begin = 0;
  uint64_t count = static_cast<uint64_t>(shape.out);
  if ((flags & kPart) != 0) {
    begin = in.Varint();
    count = in.Varint();
  }
  const auto out = static_cast<uint64_t>(shape.out);
  if (rows > kMaxRows || count > out || begin > out - count) {
    in.Take(~uint64_t{0});
    return;
  }
  piece.rows = static_cast<int64_t>(rows);
  piece.out_begin = static_cast<int64_t>(begin);
  piece.out_count = static_cast<int64_t>(count);
  piece.has_d = (flags & kHasD) != 0;
  if (shape.pass) {
    piece.bits = in.Take((rows * static_cast<uint64_t>(shape.in) + 7) / 8);
  } else {
    piece.a.block = ReadBlock(in, piece.rows * shape.in);
  }
  if (piece.has_d) piece.d.block = ReadBlock(in, piece.rows * piece.out_count);
}

}  // namespace

std::vector<RowsBlock> BlocksOf(LayerPieces& pieces) {
  std::vector<RowsBlock> blocks;
  for (RowsPiece& piece : pieces.rows) {
    auto found = std::find_if(blocks.begin(), blocks.end(), [&](const RowsBlock& block) {
      return block.out_begin == piece.out_begin && block.out_count == piece.out_count;
    });
    if (found == blocks.end()) {
      found = blocks.insert(blocks.end(), {piece.out_begin, piece.out_count, {}, 0});
    }
    piece.row_begin = found->rows;
    found->rows += piece.rows;
    found->pieces.push_back(&piece);
  }
  return blocks;
}

template <typename T>
std::vector<std::byte> PositiveBits(const TensorView& a) {
  const auto count = static_cast<size_t>(a.num_elements());
  std::vector<T> values(count);
  ConvertTo(a, values.data());
  std::vector<std::byte> bits((count + 7) / 8);
  for (size_t i = 0; i < count; ++i) {
    if (!(values[i] <= T(0))) bits[i / 8] |= std::byte{1} << (i % 8);
  }
  return bits;
}

template <typename T>
void WriteFactorShare(const std::vector<LayerShape>& layers, const std::vector<LayerInput>& own,
                      double scale, bool replan, ShareWriter& out) {
  const bool scaled = scale != 1.0;
  out.numbers().Value(static_cast<uint8_t>((replan ? kReplan : 0) | (scaled ? kScaled : 0)));
  if (scaled) out.numbers().Value(scale);
  for (size_t l = 0; l < layers.size(); ++l) {
    const LayerInput& layer = own[l];
    out.numbers().Varint(layer.rows.size());
    for (const RowsSegment& segment : layer.rows) WriteRows<T>(layers[l], segment, out);
    if (layers[l].pass) continue;
    out.numbers().Varint(layer.indexed.size());
    for (const IndexedSegment& segment : layer.indexed) WriteIndexed(segment, out);
    out.numbers().Value(static_cast<uint8_t>(layer.dense.data != nullptr));
    if (layer.dense.data != nullptr) {
      out.Block(layer.dense);
      if (layers[l].bias) out.Block(layer.dense_bias);
    }
  }
}

void AddOwnPieces(const std::vector<LayerShape>& layers, const std::vector<LayerInput>& own,
                  int rank, double scale, std::vector<LayerPieces>& pieces) {
  for (size_t l = 0; l < layers.size(); ++l) {
    const LayerInput& layer = own[l];
    int ordinal = 0;
    for (const RowsSegment& segment : layer.rows) {
      RowsPiece piece;
      piece.rank = rank;
      piece.ordinal = ordinal++;
      piece.rows = segment.a.shape[0];
      piece.has_d = segment.d.data != nullptr;
      piece.out_count = piece.has_d ? segment.d.shape[1] : layers[l].out;
      piece.out_begin = piece.out_count == layers[l].out ? 0 : segment.out_begin;
      piece.scale = scale;
      piece.a.own = &segment.a;
      piece.d.own = &segment.d;
      pieces[l].rows.push_back(piece);
    }
    for (const IndexedSegment& segment : layer.indexed) {
      pieces[l].indexed.push_back({.rank = rank,
                                   .rows = segment.index.num_elements(),
                                   .scale = scale,
                                   .index = {},
                                   .own_index = &segment.index,
                                   .x = {{}, &segment.x}});
    }
    if (layer.dense.data != nullptr) {
      pieces[l].dense.push_back({rank, scale, {{}, &layer.dense}, {{}, &layer.dense_bias}});
    }
  }
}

Status ParseFactorShare(const TensorSpec& spec, const std::vector<LayerShape>& layers, int rank,
                        ByteSpan share, std::vector<LayerPieces>& pieces, bool& replan) {
  ByteReader in(share);
  const auto flags = in.Value<uint8_t>();
  const double scale = (flags & kScaled) != 0 ? in.Value<double>() : 1.0;
  if ((flags & kReplan) != 0) replan = true;
  for (size_t l = 0; l < layers.size(); ++l) {
    const size_t num_rows = in.Count();
    for (size_t i = 0; i < num_rows && in.ok(); ++i) {
      RowsPiece piece;
      piece.rank = rank;
      piece.ordinal = static_cast<int>(i);
      piece.scale = scale;
      ParseRows(layers[l], in, piece);
      if (in.ok()) pieces[l].rows.push_back(piece);
    }
    if (layers[l].pass) continue;
    const size_t num_indexed = in.Count();
    for (size_t i = 0; i < num_indexed && in.ok(); ++i) {
      IndexedPiece piece;
      piece.rank = rank;
      piece.scale = scale;
      piece.rows = static_cast<int64_t>(in.Count());
      piece.index = in.Take(static_cast<uint64_t>(piece.rows) * sizeof(uint32_t));
      piece.x.block = ReadBlock(in, piece.rows * layers[l].in);
      if (in.ok()) pieces[l].indexed.push_back(piece);
    }
    if (in.Value<uint8_t>() != 0) {
      DensePiece piece;
      piece.rank = rank;
      piece.scale = scale;
      piece.weight.block = ReadBlock(in, layers[l].out * layers[l].in);
      if (layers[l].bias) piece.bias.block = ReadBlock(in, layers[l].out);
      if (in.ok()) pieces[l].dense.push_back(piece);
    }
  }
  if (in.AtEnd()) return Status::Ok();
  return Status::InvalidArgument("\"" + spec.name + "\": rank " + std::to_string(rank) +
                                 " sent factors that are cut short or too long");
}

#define DAD_INSTANTIATE(T)                                            \
  template std::vector<std::byte> PositiveBits<T>(const TensorView&); \
  template void WriteFactorShare<T>(const std::vector<LayerShape>&,   \
                                    const std::vector<LayerInput>&, double, bool, ShareWriter&)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
