// Chunked top-k: of every `chunk` elements in memory order the k largest are sent, in few bits
// each, and the others wait.
//
//   E_w = β E_w + G_w;   C_w = q(top_k(E_w));   E_w -= C_w                     every rank
//
// top_k takes the k largest magnitudes of each chunk (of equal ones those that come first, never
// zeros) and q rounds to a sign and a level relative to the chunk's scale (codec/chunk_topk.h).
//
//   gather   C_w goes to all, and all add in rank order; Average divides the sum by W. One round.
//   owner    the tensor is cut into a piece of whole chunks per rank. A piece goes to its owner,
//              S = β E_o + (1/W) Σ_w C_w;   M = q(top(S));   E_o = S - M
//            and all apply M. top takes as many of a chunk as the rank that sent the most of it, so
//            that bytes do not grow with W; a chunk of which nothing came waits. Two rounds.
//
// chunk_topk_rows is the same for an embedding, whose contribution is a layer with indexed rows.
// Only rows that were looked up take part on a rank: the others wait as they are, also with β < 1,
// and of a chunk the k is that part of it that takes part. A layer with other segments is formed,
// and all of it takes part.
//
// With β = 1 nothing is lost: Σ_t M + E_o + (1/W) Σ_w E_w = Σ_t mean_w G_w.
//
// A share is a byte, 1 if the contribution was not finite, and unless it is, the encoding of the
// tensor (gather) or of the piece (owner). Then all ranks get NaN, and no state changes.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

// Method: `chunk_topk;chunk=4096;k=64;bits=2;decay=1.0;combine=owner;first=0` (or gather; `first`
// owns the first piece), or
// `chunk_topk_rows;...;layer=OUTxIN`.
Result<std::unique_ptr<Exchange>> MakeChunkTopKExchange(const TensorSpec& spec,
                                                        const ExchangeEnv& env);

int64_t ChunkTopKShareBytes(const TensorSpec& spec);

}  // namespace dad
