// Which address of this host the others shall connect to.
#pragma once

#include <string>

#include "dad/engine.h"
#include "dad/status.h"

namespace dad::tcp {

// A numeric address: of the first of `interfaces` (comma separated) that exists and has
// one; without such a wish of the interface that routes to the rendezvous server;
// without a server of the host's name, or loopback if all ranks are here.
Result<std::string> LocalAddress(const World& world, const std::string& interfaces);

}  // namespace dad::tcp
