// Threads on which kernels report that they are done.
//
// The `done` of an asynchronous kernel may go on with the graph on the thread that calls it: on the
// core's worker it would hold up all collectives, and wait for ever once it waits for one of them.
// TensorFlow's own pools may be full of products.
#pragma once

#include <chrono>
#include <functional>

namespace dad_tensorflow {

// Runs `task` on one of a few threads, never inline.
void RunLater(std::function<void()> task);

// Runs a short `task` when `delay` has passed, at most a hundredth of a second later, on a thread
// of its own.
void RunAfter(std::chrono::milliseconds delay, std::function<void()> task);

}  // namespace dad_tensorflow
