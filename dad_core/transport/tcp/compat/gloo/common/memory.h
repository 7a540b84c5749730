// Debian's libgloo-dev leaves out this header, which its other headers include. They need two types
// of it as members, which we never call: this file gives their layout in gloo 0.5. It comes after
// the system's headers on the include path, so that a complete installation uses its own.
#pragma once

#include <memory>

#include "gloo/config.h"

static_assert(GLOO_VERSION == 500, "check the layout below against gloo/common/memory.h");

namespace gloo {

template <typename T>
class NonOwningPtr final {
  std::shared_ptr<T> pointer_;
};

template <typename T>
class WeakNonOwningPtr final {
  std::weak_ptr<T> pointer_;
};

}  // namespace gloo
