// What the text of a sparse method says (sparse.h has the equations).
#pragma once

#include <cstdint>

#include "codec/sparse_code.h"
#include "dad/method.h"
#include "dad/status.h"

namespace dad {

enum class SparseRule { kVgc, kVgcStrom, kStrom, kTopK };

struct SparseSettings {
  SparseRule rule = SparseRule::kVgc;
  LayerShape layer;
  double alpha = 1;
  double zeta = 0.999;
  bool by_sample = false;
  Coding coding = Coding::kRice;
  bool feedback = false;
  double tau = 4;
  double tau_absolute = -1;  // negative: tau is relative
  double ratio = 0.01;

  bool has_variance() const { return rule == SparseRule::kVgc || rule == SparseRule::kVgcStrom; }
  bool has_tau() const { return rule == SparseRule::kVgcStrom || rule == SparseRule::kStrom; }
  bool absolute() const { return tau_absolute >= 0; }
  bool keeps_residual() const { return rule != SparseRule::kTopK || feedback; }
  int value_bits() const { return rule == SparseRule::kTopK ? 0 : has_tau() && absolute() ? 1 : 4; }
  int64_t weight_count() const { return layer.out * layer.in; }
  int64_t count() const { return layer.num_elements(); }
};

// InvalidArgument, naming the option, unless all of them make sense.
Result<SparseSettings> ParseSparseSettings(const Method& method);

}  // namespace dad
