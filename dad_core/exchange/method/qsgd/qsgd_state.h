// What QSGD keeps between steps, wherever it computes: their number.
#pragma once

#include <cstdint>
#include <vector>

#include "exchange/feedback/state_store.h"

namespace dad {

class QsgdState final : public ExchangeState {
 public:
  void Export(std::vector<StateTensor>& out) override;
  Status Import(const std::vector<StateTensor>& tensors) override;
  void ReturnLast() override {}  // nothing waits

  int64_t step = 0;
};

}  // namespace dad
