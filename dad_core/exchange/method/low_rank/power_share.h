// The power iteration of low rank (exchange/method/low_rank/low_rank.h): its shares, and what the
// owner does with them. A share:
//
//   u8 flags (low_rank_share.h); unless it is not finite: r×m or r×columns values
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "exchange/method/low_rank/low_rank_share.h"
#include "util/gather_buffer.h"

namespace dad {

// `flags` of `share`, and its `count` values; none if it is not finite. InvalidArgument, naming the
// rank, if it is malformed.
template <typename T>
Status ReadPowerShare(const TensorSpec& spec, int rank, ByteSpan share, int64_t count,
                      uint8_t& flags, std::vector<T>& values);

// sum += values · weight.
template <typename T>
void AddWeighted(std::span<const T> values, T weight, std::vector<T>& sum);

// Rows made orthonormal in turn, in double; one that is nothing but rounding becomes zero.
template <typename T>
void OrthonormaliseRows(MatrixView<T> p);

// Where the next step starts: what was applied. A direction that was nothing would find nothing
// ever again, so it starts at random, the same on every rank.
template <typename T>
std::vector<T> NextPowerStart(MatrixView<const T> vt);

}  // namespace dad
