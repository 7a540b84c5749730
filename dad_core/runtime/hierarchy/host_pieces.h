// What a request contributes to the sum inside a host (hierarchy.h). Gradients that come in rows
// are formed first, because rows of different ranks cannot be added up.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "dad/request.h"
#include "dad/status.h"
#include "dad/tensor_view.h"

namespace dad {

// What is added up inside a host, and where the sum goes.
struct HostPiece {
  HostPiece(TensorView from, TensorView to, bool is_result = true)
      : input(std::move(from)), output(std::move(to)), result(is_result) {
    output.shape = input.shape;  // it may be that of the transposed
  }
  TensorView input;
  TensorView output;
  bool result;      // whether it comes back from other hosts
  int64_t out = 0;  // if not 0: it is in × out then and is sent as out × in
};

// Leaves the request's layers with nothing but a dense part, and its squares; the request holds the
// memory of what was formed. InvalidArgument for what does not go from host to host.
Result<std::vector<HostPiece>> HostPiecesOf(Request& request);

}  // namespace dad
