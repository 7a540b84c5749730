// The sparse family (exchange/method/sparse/sparse.h) of gradients on a device: r and v stay there,
// and so do the pass, the selection, the words and their Rice code. What crosses to the host is the
// share, and how long it is. Shares of the others are read and checked on the host, where Rice code
// has to be read bit by bit; their words are added on the device, in rank order. The bits are those
// of the host's exchange, on the wire and in the result.
//
// Rows are multiplied out by cuBLAS where that is: G = Dᵀ A and Σ g² = (D∘D)ᵀ(A∘A), this rank's own
// matter, so ranks need not have the same device for it.
//
// A contribution that it does not take from the device (samples of several rows whose squares are
// wanted, indexed rows, a transposed output, rows without cuBLAS)
// comes by way of the host and is exchanged as there; the state moves along. The other ranks need
// not know.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

// vgc, vgc_strom and strom; top-k is computed on the host.
bool SparseOnDevice(const TensorSpec& spec, const ExchangeEnv& env);
bool SparseTakesFromDevice(const TensorSpec& spec, const Contribution& mine,
                           const ExchangeEnv& env);

Result<std::unique_ptr<Exchange>> MakeDeviceSparseExchange(const TensorSpec& spec,
                                                           const ExchangeEnv& env);

}  // namespace dad
