// Error feedback: what a compressor q leaves out in one step is added to the next.
//
//   x = g + E;   q(x) is sent;   E = x - q(x)         so that Σ_t q(x) + E = Σ_t g
//
// For compressors that decode to an array of values, of one element each or of a bucket: an
// exchange has one Feedback wherever it compresses, on the rank's side and on the owner's. E
// changes only in Commit, so a step that is cancelled, or in which some rank's gradient is not
// finite, leaves it as it was.
//
// Two families keep E in a way of their own, since they would otherwise pass over it twice:
//   low rank (low_rank_state.h)   subtracts what was sent when the next gradient is added, and can
//                                 keep E as rows instead of a matrix
//   sparse (sparse_state.h)       vgc, strom and top-k add, test, select and decay in one pass, and
//                                 clear a sent element together with its variance
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dad/state.h"
#include "dad/status.h"
#include "exchange/by_method.h"

namespace dad {

template <typename T>
class Feedback {
 public:
  // At the start of a step. E is zeros, unless there is one. Off: E is neither added nor changed.
  // InvalidArgument if E has another number of elements.
  Status Fit(int64_t count, bool on) {
    on_ = on;
    if (residual_.empty()) residual_.assign(static_cast<size_t>(count), T(0));
    if (static_cast<int64_t>(residual_.size()) == count) return Status::Ok();
    return Status::InvalidArgument("a saved residual of " + std::to_string(residual_.size()) +
                                   " elements does not fit " + std::to_string(count));
  }

  // Memory for g, then for x, until the next step.
  std::span<T> Values() {
    left_ = false;
    next_.resize(residual_.size());
    return next_;
  }
  // x = scale · g + E.
  void Add(T scale) {
    for (size_t i = 0; i < next_.size(); ++i) {
      next_[i] = next_[i] * scale + (on_ ? residual_[i] : T(0));
    }
  }
  // x - q(x): it becomes E when the step counts.
  void Leave(std::span<const T> decoded) {
    for (size_t i = 0; i < next_.size(); ++i) next_[i] -= decoded[i];
    left_ = true;
  }
  // The step counts.
  void Commit() {
    if (on_ && left_) std::swap(residual_, next_);
    left_ = false;
  }
  // What was decoded in the last step has not been used: it waits again.
  void Return(std::span<const T> decoded) {
    if (decoded.size() != residual_.size()) return;
    for (size_t i = 0; i < decoded.size(); ++i) residual_[i] += decoded[i];
  }

  // For checkpoints.
  void Save(const char* name, std::vector<StateTensor>& out) const {
    if (residual_.empty()) return;
    StateTensor tensor{name, DTypeOf<T>(), {static_cast<int64_t>(residual_.size())}, {}};
    tensor.bytes.resize(residual_.size() * sizeof(T));
    std::memcpy(tensor.bytes.data(), residual_.data(), tensor.bytes.size());
    out.push_back(std::move(tensor));
  }
  Status Load(const StateTensor& tensor) {
    const auto count = static_cast<size_t>(NumElements(tensor.shape));
    if (tensor.dtype != DTypeOf<T>() || tensor.bytes.size() != count * sizeof(T)) {
      return Status::InvalidArgument("a saved " + tensor.name + " has another type");
    }
    residual_.resize(count);
    if (count > 0) std::memcpy(residual_.data(), tensor.bytes.data(), tensor.bytes.size());
    return Status::Ok();
  }

 private:
  bool on_ = true;
  bool left_ = false;
  std::vector<T> residual_;
  std::vector<T> next_;
};

}  // namespace dad
