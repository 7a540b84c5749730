// What waits of a tensor for later steps, as large as the tensor itself. A step makes the next ones
// beside those that there are, which keep their place until it is over.
#pragma once

#include <cstdint>

#include "util/aligned_buffer.h"

namespace dad {

// r, and v for methods that need the variance. For a layer, the elements of the weight come first,
// then those of the bias. Not initialised.
template <typename T>
class Accumulators {
 public:
  Accumulators() = default;
  Accumulators(int64_t count, bool with_variance);

  bool empty() const { return r_.size() == 0; }
  T* r() { return reinterpret_cast<T*>(r_.data()); }
  T* v() { return v_.size() == 0 ? nullptr : reinterpret_cast<T*>(v_.data()); }
  AlignedBuffer& r_bytes() { return r_; }
  const AlignedBuffer& r_bytes() const { return r_; }
  AlignedBuffer& v_bytes() { return v_; }
  void Clear();
  // Leaves the memory to the next one of the same size on this thread.
  void Release();

 private:
  AlignedBuffer r_;
  AlignedBuffer v_;
};

}  // namespace dad
