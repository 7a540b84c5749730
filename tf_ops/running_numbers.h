// Numbers for calls without a name: counted per kind and process set, so that ranks inside and
// outside a set stay in step. A new engine starts again at zero.
#pragma once

#include <memory>

#include "dad/engine.h"
#include "dad/request.h"
#include "dad/ticket.h"

namespace dad_tensorflow {

// Submits under the next number. A request that is refused on this rank leaves it to the next one:
// the other ranks know nothing of it.
std::shared_ptr<dad::Ticket> SubmitNumbered(const std::shared_ptr<dad::Engine>& engine,
                                            dad::Request request);

// After a join: ranks came to it after different numbers of calls.
void RestartNumbers();

}  // namespace dad_tensorflow
