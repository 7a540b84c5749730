// What an exchange's op is given for one pair, and what comes of it: an attribute of the op, as
// text (ops.cc), with the syntax of a method's options.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dad/status.h"

namespace dad_tensorflow {

struct Part {
  int pair = 0;
  int rows = 0;
  int indexed = 0;
  bool has_dense = false;
  bool has_bias = false;
  bool transposed = false;  // the result, and in a chain the weight, lie as in × out
  bool forms = false;  // the rows come in any case: where the plan wants it formed, form it here
  std::vector<int64_t> begins;
  std::vector<int64_t> samples;  // of each (A, D) and (index, rows); kComes: as a tensor
};
constexpr int64_t kComes = -1;

// InvalidArgument for an unknown key or a value that is no number.
dad::Result<Part> ParsePart(const std::string& text);

}  // namespace dad_tensorflow
