// The address of this host that the others should connect to.
#pragma once

#include <string>

#include "dad/engine.h"
#include "dad/status.h"

namespace dad::tcp {

// A numeric address: that of the first of `interfaces` (comma separated) that exists and has one.
// Without `interfaces`: that of the interface that routes to the rendezvous server; without a
// server: that of the host's name, or loopback if all ranks are here.
Result<std::string> LocalAddress(const World& world, const std::string& interfaces);

}  // namespace dad::tcp
