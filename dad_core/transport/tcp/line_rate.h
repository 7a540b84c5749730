// What the kernel has seen of a TCP connection.
#pragma once

#include <cstddef>

namespace dad::tcp {

// Bytes per second while there was something to send and neither end held it up; 0: not enough has
// been sent to tell.
double LineRateOf(int fd);

// Bytes per second that were delivered of late; 0: not known.
double RecentRateOf(int fd);

// The kernel takes no more than about so many bytes that it cannot send yet.
void LimitUnsent(int fd, size_t num_bytes);

// Whether its ends have different addresses: bytes between ranks of one host take no line.
bool LeavesHost(int fd);

}  // namespace dad::tcp
