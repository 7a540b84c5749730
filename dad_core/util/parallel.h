// A loop over tasks on several threads. The threads live for the call: it is for work of
// milliseconds, where starting them costs nothing, and needs nobody to own a pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace dad {

// Calls work(task) for each task in [0, num_tasks), in any order, on up to `max_threads` threads,
// one of them the caller's. work must not throw.
template <typename Work>
void ParallelFor(int64_t num_tasks, int max_threads, const Work& work) {
  const auto num_threads = static_cast<int>(std::min<int64_t>(num_tasks, max_threads));
  std::atomic<int64_t> next{0};
  auto run = [&] {
    for (int64_t task = next++; task < num_tasks; task = next++) work(task);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < num_threads; ++i) others.emplace_back(run);
  run();
  for (std::thread& thread : others) thread.join();
}

}  // namespace dad
