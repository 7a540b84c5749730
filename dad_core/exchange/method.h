// The text of Request::method taken apart. Ranks agree on it letter by letter, so it
// carries all that an exchange depends on:
//
//   none
//   factor;wire=fp32;rows=32;layer=1024x784:bias:relu;layer=10x1024:bias
//   low_rank;rank=4;wire=int4;combine=owner;owner=2;feedback=dense;layer=1024x784:bias
//   int8;bucket=512;feedback=1
//
// A layer is OUTxIN with marks: `bias`, `pass` (hands D down, its own gradient goes another
// way), and the activation between it and the layer above (`leaky_relu=0.01` has a slope).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dad/contribution.h"
#include "dad/status.h"

namespace dad {

struct LayerShape {
  int64_t out = 0;
  int64_t in = 0;
  bool bias = false;
  bool pass = false;
  Activation activation = Activation::kNone;
  double slope = 0.0;

  int64_t num_elements() const { return out * (in + (bias ? 1 : 0)); }
};

class MethodText {
 public:
  static Result<MethodText> Parse(std::string_view text);

  const std::string& name() const { return name_; }
  const std::vector<LayerShape>& layers() const { return layers_; }

  // The value of an option, or `otherwise` when it is not given.
  std::string Text(std::string_view key, std::string_view otherwise) const;
  Result<int64_t> Integer(std::string_view key, int64_t otherwise) const;
  Result<double> Real(std::string_view key, double otherwise) const;

 private:
  std::string name_;
  std::vector<std::pair<std::string, std::string>> options_;
  std::vector<LayerShape> layers_;
};

}  // namespace dad
