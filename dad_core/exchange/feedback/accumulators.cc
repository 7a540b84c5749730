#include "exchange/feedback/accumulators.h"

#include <cstring>
#include <deque>
#include <utility>

namespace dad {
namespace {

// Keeps buffers of finished steps for the next ones: getting fresh pages from the system takes as
// long as the work itself. Used by the worker thread only. The number of buffers is bounded, since
// each is as large as a tensor.
class Spares {
 public:
  AlignedBuffer Take(size_t num_bytes) {
    for (auto it = spares_.begin(); it != spares_.end(); ++it) {
      if (it->size() != num_bytes) continue;
      AlignedBuffer found = std::move(*it);
      spares_.erase(it);
      held_ -= num_bytes;
      return found;
    }
    return AlignedBuffer(num_bytes);
  }
  void Give(AlignedBuffer buffer) {
    if (buffer.size() == 0 || held_ + buffer.size() > kMostBytes) return;
    held_ += buffer.size();
    spares_.push_back(std::move(buffer));
  }

 private:
  static constexpr size_t kMostBytes = 256 << 20;
  std::deque<AlignedBuffer> spares_;
  size_t held_ = 0;
};
thread_local Spares spares;

}  // namespace

template <typename T>
Accumulators<T>::Accumulators(int64_t count, bool with_variance)
    : r_(spares.Take(static_cast<size_t>(count) * sizeof(T))),
      v_(spares.Take(with_variance ? static_cast<size_t>(count) * sizeof(T) : 0)) {}

template <typename T>
void Accumulators<T>::Clear() {
  if (r_.size() > 0) std::memset(r_.data(), 0, r_.size());
  if (v_.size() > 0) std::memset(v_.data(), 0, v_.size());
}

template <typename T>
void Accumulators<T>::Release() {
  spares.Give(std::exchange(r_, AlignedBuffer()));
  spares.Give(std::exchange(v_, AlignedBuffer()));
}

template class Accumulators<float>;
template class Accumulators<double>;

}  // namespace dad
