// Whether gradients may overflow on purpose, in this process. Thread-safe.
#pragma once

#include "dad/export.h"

namespace dad {

// A loss scaler is in use. It lets gradients overflow now and then and skips those steps, so the
// engine does not warn of gradients that are not finite any more.
DAD_EXPORT void ExpectOverflows();
DAD_EXPORT bool OverflowsAreExpected();

}  // namespace dad
