// Traffic of the sockets of one transport, counted where it is handed to the kernel.
#pragma once

#include <atomic>
#include <cstdint>

namespace dad::tcp {

struct Traffic {
  std::atomic<int64_t> bytes_sent{0};
  std::atomic<int64_t> bytes_received{0};
  std::atomic<int64_t> messages_sent{0};
};

}  // namespace dad::tcp
