// Debian's libgloo-dev leaves out this header, which its other headers include. They
// need of it two types as members, never called by us: what is given here is their
// layout in gloo 0.5. On the include path after the system's, so that a complete
// installation uses its own.
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
