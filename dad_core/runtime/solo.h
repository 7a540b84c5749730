// A collective of one rank: done at once, on the thread that asks.
#pragma once

#include "dad/status.h"
#include "runtime/request_state.h"

namespace dad {

Status RunAlone(RequestState& request);

}  // namespace dad
