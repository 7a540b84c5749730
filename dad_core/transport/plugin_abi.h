// The layout that core and plug-in must share: they share C++ classes, so both must have been
// compiled alike. Compiled into each of them, compared when one opens the other.
#pragma once

#include <string>

#include "dad/engine.h"
#include "dad/options.h"
#include "transport/transport.h"

namespace dad {

// Increase it when the meaning, not the size, of something shared changes.
inline constexpr int kPluginAbiVersion = 3;

[[maybe_unused]] static std::string MakePluginAbi() {
  return "dad-plugin-" + std::to_string(kPluginAbiVersion) + "/wire-" + std::to_string(kWireMagic) +
         "/" + __VERSION__ + "/transport-" + std::to_string(sizeof(Transport)) + "/sink-" +
         std::to_string(sizeof(MessageSink)) + "/world-" + std::to_string(sizeof(World)) +
         "/options-" + std::to_string(sizeof(Options)) + "/view-" +
         std::to_string(sizeof(TensorView));
}

}  // namespace dad
