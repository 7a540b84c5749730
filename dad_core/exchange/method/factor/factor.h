// dAD and edAD: exact factor exchange (arXiv:2102.09631).
//
// The gradient of a layer y = x Wᵀ + b over N rows is G = Dᵀ A with A: N×in its input and
// D: N×out the gradient at its output. Each rank sends its A and D to all, in one round;
// every rank stacks what it has, in rank order, and forms
//
//   mean_w G_w = (1/W) D_allᵀ A_all          straight in the gradient's memory.
//
// A chain of layers with activations φ between them (edAD) sends every A, but only the top
// layer's D. Below it, on the stacked rows of all ranks,
//
//   D_l = (D_{l+1} W_{l+1}) ∘ φ'(h_l)
//
// with φ' from the activation's output A_{l+1} where that tells it (ReLU, leaky ReLU, tanh,
// sigmoid) and from h_l = A_l W_lᵀ + b_l otherwise (GELU, SiLU). Weights are equal on all
// ranks and so are kernels, hence the bits. A layer marked `pass` has its own gradient
// exchanged in another way: of it only D travels, and of its A one bit per unit, φ' of ReLU.
//
// A rank may send no rows, or D of any layer (its chain did not hold in this step), or dense
// remainders beside the rows (a weight that was also used elsewhere): a share says what is
// in it, see wire_format.md. Zeros of ReLU are packed without loss.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace dad {

Result<std::unique_ptr<Exchange>> MakeFactorExchange(const TensorSpec& spec,
                                                     const ExchangeEnv& env);

// Bytes that a rank with `rows` rows (an option of the method) sends to one peer.
int64_t FactorShareBytes(const TensorSpec& spec);

}  // namespace dad
