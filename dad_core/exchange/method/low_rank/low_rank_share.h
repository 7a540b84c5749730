// The text of a low-rank method taken apart, and its shares (exchange/method/low_rank/low_rank.h):
//
//   u8 flags; unless it is not finite: u8 k, then ut and vt as codec/factor_wire.h has them
#pragma once

#include <cstdint>

#include "codec/factor_wire.h"
#include "dad/method.h"
#include "dad/status.h"
#include "exchange/exchange.h"
#include "exchange/method/low_rank/low_rank_state.h"
#include "linalg/low_rank.h"

namespace dad {

enum class LowRankCombine { kOwner, kGather, kPower };

struct LowRankSettings {
  LayerShape layer;
  LowRankOptions options;
  LowRankCombine combine = LowRankCombine::kOwner;
  int owner = 0;
  Wire wire = Wire::kInt4;
  Feedback feedback = Feedback::kDense;

  int64_t columns() const { return layer.in + (layer.bias ? 1 : 0); }
};

// Bits of a share's first byte.
constexpr uint8_t kLowRankNotFinite = 1;
constexpr uint8_t kLowRankReplan = 2;

Result<LowRankSettings> ParseLowRankSettings(const TensorSpec& spec);

// Where the random start of a side (1: a rank's, 2: the owner's) begins.
uint64_t LowRankSeed(const LowRankSettings& settings, uint64_t side);

// `flags` of `share`, and its factors; none if it is not finite. InvalidArgument, naming the rank,
// if it is malformed.
template <typename T>
Status ReadLowRankShare(const TensorSpec& spec, const LowRankSettings& settings, int rank,
                        ByteSpan share, uint8_t& flags, SentFactors<T>& factors);
Status MalformedLowRank(const TensorSpec& spec, int rank);

}  // namespace dad
