// What the kernel has observed of a TCP connection.
#pragma once

#include <cstddef>

namespace dad::tcp {

// Bytes per second while there was something to send and neither end held it up; 0: not enough was
// sent to tell.
double LineRateOf(int fd);

// Bytes per second that were delivered recently; 0: unknown.
double RecentRateOf(int fd);

// The kernel takes no more than about this many bytes that it cannot send yet.
void LimitUnsent(int fd, size_t num_bytes);

// Whether its ends have different addresses: traffic between ranks of one host uses no line.
bool LeavesHost(int fd);

}  // namespace dad::tcp
