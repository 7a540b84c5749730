// What the kernel has seen of a TCP connection.
#pragma once

namespace dad::tcp {

// Bytes per second while there was something to send and neither end held it up; 0: not enough has
// been sent to tell.
double LineRateOf(int fd);

// Whether its ends have different addresses: bytes between ranks of one host take no line.
bool LeavesHost(int fd);

}  // namespace dad::tcp
