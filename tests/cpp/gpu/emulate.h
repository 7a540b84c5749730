// Runs a kernel of codec/cuda/kernel_list.h on the host: every block, phase by phase, every thread.
// Blocks and threads go in a mixed-up order, and shared memory begins as rubbish, so that what
// depends on either is found. Not a GPU: it shows indexing, boundaries and arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "codec/cuda/kernel.h"

namespace dad::cuda {

template <typename Kernel>
void Emulate(const typename Kernel::Args& args, uint32_t seed = 1) {
  std::minstd_rand random(seed);
  const int64_t blocks = Kernel::Blocks(args);
  const int phases = [&] {
    if constexpr (HasFixedPhases<Kernel>::kValue) {
      return Kernel::kPhases;
    } else {
      return Kernel::Phases(args);
    }
  }();
  std::vector<int64_t> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int> threads(kThreads);
  std::iota(threads.begin(), threads.end(), 0);
  const auto shared = std::make_unique<typename Kernel::Shared>();
  for (const int64_t block : order) {
    std::memset(static_cast<void*>(shared.get()), 0xa5, sizeof *shared);
    for (int phase = 0; phase < phases; ++phase) {
      std::shuffle(threads.begin(), threads.end(), random);
      for (const int thread : threads) Kernel::Phase(phase, {block, thread}, *shared, args);
    }
  }
}

}  // namespace dad::cuda
