// Whether gradients may overflow on purpose, in this process. Thread-safe.
#pragma once

namespace dad {

// A loss scaler is in use. It lets gradients overflow now and then and skips those steps, so the
// engine does not warn of gradients that are not finite any more.
void ExpectOverflows();
bool OverflowsAreExpected();

}  // namespace dad
