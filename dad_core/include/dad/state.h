// What an exchange keeps between steps (residuals, warm starts), for checkpoints.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "dad/tensor_view.h"

namespace dad {

struct StateTensor {
  std::string name;  // "residual", "owner_residual", "warm_start", …
  DType dtype = DType::kFloat32;
  Shape shape;
  std::vector<std::byte> bytes;
};

}  // namespace dad
